"""Pipelines of diffusers, tiny and of random weights, on our forward through torch's attention."""

import pytest
import sdpa_cases
import torch

import flashattn_ext

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

torchs_own_kernels, served = sdpa_cases.torchs_own_kernels, sdpa_cases.served


def make_vae():
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=16)
    return vae.eval()


def make_scheduler():
    """Of little noise: much is divided by almost nothing, and rounding errors with it."""
    return diffusers.DDIMScheduler(beta_end=0.001, clip_sample=False, steps_offset=1)


def stable_diffusion():
    """A UNet: attention to itself and to 77 tokens of a prompt; one head in the decoder."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=16, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=4,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32,
    )  # fmt: skip
    pipeline = diffusers.StableDiffusionPipeline(
        unet=unet.eval(), vae=make_vae(), scheduler=make_scheduler(), text_encoder=None,
        tokenizer=None, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    prompt = torch.randn(1, 77, 32)
    options = {"prompt_embeds": prompt, "negative_prompt_embeds": -prompt}
    return pipeline, options | {"height": 16, "width": 16}


def diffusion_transformer():
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2,
        sample_size=16, patch_size=2,
    )  # fmt: skip
    pipeline = diffusers.DiTPipeline(
        transformer=transformer.eval(), vae=make_vae(), scheduler=make_scheduler()
    )
    return pipeline, {"class_labels": [1, 2]}


# Attentions of one denoising step: the UNet has four layers of two.
CALLS = {stable_diffusion: 8, diffusion_transformer: 2}


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_images(make, device, served):
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.float16
    pipeline, options = make()
    pipeline.to(device, dtype).set_progress_bar_config(disable=True)
    options = {
        name: value.to(device, dtype) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }

    def images():
        noise = torch.Generator().manual_seed(0)
        images = pipeline(**options, num_inference_steps=2, output_type="np", generator=noise)
        return torch.from_numpy(images.images)

    torchs = images()
    assert served == []
    with flashattn_ext.activate_sdpa():
        ours = images()
    assert len(served) == 2 * CALLS[make] + 1  # and one in the decoder of the images
    assert torchs.std() > 0.1
    tolerance = 1e-5 if device == "cpu" else 2e-2
    torch.testing.assert_close(ours, torchs, atol=tolerance, rtol=0)
