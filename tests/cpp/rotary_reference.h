// Rotary embedding written out from its definition, in double: the oracle of the C++ tests, on
// purpose without csrc/core.
#pragma once

#include <vector>

namespace oracle {

// `cosines` and `sines` are one row of the tables: rotary_dim / 2 angles.
inline std::vector<double> rotated(std::vector<float> const& x, std::vector<float> const& cosines,
                                   std::vector<float> const& sines, bool interleaved) {
  std::vector<double> y(x.begin(), x.end());
  int const pairs = static_cast<int>(cosines.size());
  for (int t = 0; t < pairs; ++t) {
    int const first = interleaved ? 2 * t : t, second = interleaved ? 2 * t + 1 : t + pairs;
    double const a = x[first], b = x[second];
    y[first] = a * cosines[t] - b * sines[t];
    y[second] = a * sines[t] + b * cosines[t];
  }
  return y;
}

}  // namespace oracle
