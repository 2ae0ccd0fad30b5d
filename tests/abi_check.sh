#!/bin/sh
# One binary for every torch: loads the built package with other versions of torch and compares a
# few results with plain PyTorch.
#
#   tests/abi_check.sh PACKAGE_DIR [TORCH_SPEC ...]
#
# PACKAGE_DIR is a built flashattn_ext folder (with _C.so), for example the one in site-packages.
# Each TORCH_SPEC (default: torch==2.10.0) is installed by pip into a fresh virtual environment in a
# temporary folder; the package's files are copied there as they are. PYTHON picks the interpreter.
set -eu

package=${1:?usage: tests/abi_check.sh PACKAGE_DIR [TORCH_SPEC ...]}
shift
[ -f "$package/_C.so" ] || { echo "error: $package/_C.so does not exist: build first" >&2; exit 2; }
[ $# -gt 0 ] || set -- torch==2.10.0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat > "$work/check.py" <<'PYTHON'
import sys

import torch

import flashattn_ext
from flashattn_ext import flash_fwd

torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
    q, k, v = (torch.randn(2, rows, heads, 64, dtype=dtype) for rows, heads in ((33, 4), (70, 2), (70, 2)))
    out, lse = flash_fwd(q, k, v, return_lse=True)
    q64 = q.double().transpose(1, 2)
    k64, v64 = (t.double().transpose(1, 2).repeat_interleave(2, dim=1) for t in (k, v))
    scores = q64 @ k64.mT * 64**-0.5
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=0)
    expected = (scores.softmax(-1) @ v64).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    given = torch.full_like(q, float("nan"))
    assert flash_fwd(q, k, v, out=given) is given and torch.equal(given, out)
    starts = [torch.tensor([0, rows, 2 * rows], dtype=torch.int32) for rows in (33, 70)]
    packed = flash_fwd(*(t.flatten(0, 1) for t in (q, k, v)), cu_seqlens_q=starts[0],
                       cu_seqlens_k=starts[1], max_seqlen_q=33, max_seqlen_k=70)
    torch.testing.assert_close(packed.view_as(out), out, atol=tolerance, rtol=tolerance)
assert flash_fwd(q.to("meta"), k.to("meta"), v.to("meta")).shape == q.shape
try:
    flash_fwd(q, k[..., :32], v)
    sys.exit("error: a wrong shape was accepted")
except ValueError:
    pass
try:
    torch.ops.flashattn_ext.fwd(q, k[:1], v, None, None, None, -1, -1, 1.0, -1, -1, 0.0, None, None)
    sys.exit("error: the operator accepted a wrong shape")
except ValueError:
    pass
print(f"ok: flashattn_ext {flashattn_ext.__version__}, torch {torch.__version__}, "
      f"Python {sys.version.split()[0]}")
PYTHON

for spec in "$@"; do
  env=$work/env
  rm -rf "$env"
  "${PYTHON:-python3}" -m venv "$env"
  "$env/bin/python" -m pip install --quiet "$spec" numpy
  cp -R "$package" "$work/flashattn_ext"
  (cd "$work" && PYTHONPATH=$work "$env/bin/python" check.py)
  rm -rf "$work/flashattn_ext"
done
