// How a raw dot product becomes a score: scale, softcap, ALiBi, in this order. The bias of ALiBi is added by each
// backend.
#pragma once

#include "core/fast_math.h"
#include "core/macros.h"
#include "flashattn/params.h"

namespace flashattn {

// Scores stay raw dot products, and the scale is folded into the exponent (`exponent_scale`),
// unless something has to act on the scaled score first. A scale that is not positive counts as
// such a thing: the running maximum is taken before an exponent scale is applied, which is only
// right when that scale is positive.
struct ScoreMod {
  bool active;  // every score is to be modified
  float scale;
  float softcap;
  float inverse_softcap;
  bool alibi;
  float exponent_scale;  // score * exponent_scale is the exponent of e, once modified if active

  // Up to such a cap what capped_quotient loses near 0 stays below 2e-5.
  static constexpr float kSmallCap = 64.f;

  FA_HD float scaled_and_capped(float raw) const {
    float const s = raw * scale;
    return softcap > 0.f ? softcap * tanh_saturating(s * inverse_softcap) : s;
  }

  // What a raw product is multiplied with for capped_quotient. Finite, as a product of 0 has the score 0 with any cap.
  FA_HD float cap_exponent() const {
    constexpr float kLargest = 3.4028234e38f;
    return ::fminf(::fmaxf(2.f * kLog2e * scale * inverse_softcap, -kLargest), kLargest);
  }

  // softcap * tanh(s / softcap) as softcap - 2 softcap / (1 + e^(2 s / softcap)), right to some 3e-7 of the cap: five
  // instructions, for `exponent` = raw * cap_exponent().
  FA_HD float capped_quotient(float exponent) const {
    return softcap - 2.f * softcap * reciprocal_fast(1.f + exp2_fast(exponent));
  }
};

FA_HD ScoreMod score_mod(Score const& score) {
  bool const alibi = score.alibi_slopes != nullptr;
  bool const active = score.softcap > 0.f || alibi || !(score.scale > 0.f);
  float const inverse = score.softcap > 0.f ? 1.f / score.softcap : 0.f;
  return {active, score.scale, score.softcap, inverse, alibi, active ? 1.f : score.scale};
}

}  // namespace flashattn
