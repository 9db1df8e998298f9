// Probabilities, samples, the largest logits and masks.
#pragma once
#include "checks.h"
#include "philox.h"

namespace {

void test_softmax() {
  for (int64_t dim : {1, 7, 64, 1003}) {
    const int64_t rows = 4;
    std::vector<float> x = random<float>(rows * dim, 5), out(rows * dim), log(rows * dim), largest(rows);
    std::vector<int64_t> at(rows);
    kernels().softmax({x.data(), dim, out.data(), rows, dim, false});
    kernels().softmax({x.data(), dim, log.data(), rows, dim, true});
    kernels().argmax({x.data(), dim, at.data(), rows, dim});
    x[dim - 1] = NAN;  // argmax passes over it, row_max does not
    kernels().row_max({x.data(), dim, largest.data(), rows, dim});
    check(largest[0] != largest[0], "row_max of a row with NaN is %g", largest[0]);
    for (int64_t i = 1; i < rows; i++) {
      const float* row = x.data() + i * dim;
      const float* top = std::max_element(row, row + dim);
      check(at[i] == top - row, "argmax");
      check(largest[i] == *top, "row_max");
      double sum = 0;
      for (int64_t j = 0; j < dim; j++) sum += std::exp(double(row[j]) - *top);
      for (int64_t j = 0; j < dim; j++) {
        const float difference = row[j] - *top;  // rounded, as by the kernels
        const double v = difference - std::log(sum);
        check(std::fabs(out[i * dim + j] - std::exp(v)) <= 2e-6 * std::exp(v) + 1e-38, "softmax %d",
            int(dim));
        check(near(log[i * dim + j], v, 1e-6), "log_softmax %d", int(dim));
      }
    }
  }
}

void test_sample() {
  constexpr int64_t rows = 200, dim = 700;
  std::vector<float> x = random<float>(rows * dim, 3);
  std::vector<SamplingRow> params(rows);
  for (int64_t i = 0; i < rows; i++)
    params[i] = {i % 10 ? 0.5f + 0.01f * float(i) : 0.0f, i % 3 ? 0.0f : 0.02f, i % 4 < 2 ? 1.0 : 0.8,
                 uint64_t(below(1 << 20)) << 20, uint32_t(i), 1, i % 5 < 2 ? 1 + below(40) : 0};
  x[dim + 3] = NAN;
  std::vector<int64_t> out(rows);
  kernels().sample({x.data(), dim, params.data(), out.data(), rows, dim});
  check(out[1] == -1, "a row with NaN was sampled");
  for (int64_t i = 0; i < rows; i++) {
    if (i == 1) continue;
    const float* row = x.data() + i * dim;
    const SamplingRow& p = params[i];
    std::vector<int64_t> rank(dim);
    for (int64_t j = 0; j < dim; j++) rank[j] = j;
    std::sort(rank.begin(), rank.end(), [&](int64_t a, int64_t b) { return row[a] > row[b]; });
    if (p.temperature == 0) {
      check(out[i] == rank[0], "greedy sampling");
      continue;
    }
    // What every filter leaves; of that, the first to arrive, or nearly.
    std::vector<double> weight(dim);
    double total = 0, kept = 0;
    for (int64_t r = 0; r < dim; r++) {
      const double w = std::exp((double(row[rank[r]]) - row[rank[0]]) / p.temperature);
      if ((p.top_k > 0 && r >= p.top_k) || w < p.min_p) break;
      total += weight[rank[r]] = w;
    }
    for (int64_t r = 0; r < dim; r++) {
      if (kept >= p.top_p * total) weight[rank[r]] = 0;
      kept += weight[rank[r]];
    }
    std::vector<double> arrives(dim, INFINITY);
    for (int64_t j = 0; j < dim; j++) {
      const auto words = philox4x32({p.position, p.stream, uint32_t(j / 64 * 16 + j % 16), 0},
                                    {uint32_t(p.seed), uint32_t(p.seed >> 32)});
      if (weight[j] > 0)
        arrives[j] = -std::log(1 - (words[j % 64 / 16] + 0.5) * 0x1p-32) / weight[j];
    }
    check(arrives[out[i]] <= 1.00001 * *std::min_element(arrives.begin(), arrives.end()),
          "sample: token %d of row %d", int(out[i]), int(i));
  }
}

void test_top_k() {
  const std::vector<float> x = {1, 5, NAN, 5, -2, 7};
  float values[4];
  int64_t at[4];
  kernels().top_k({x.data(), 6, values, at, 1, 6, 4});
  const int64_t want[] = {5, 1, 3, 0};
  check(std::equal(at, at + 4, want) && values[0] == 7 && values[3] == 1, "top_k");
}

void test_bitmask() {
  for (int64_t dim : {1, 31, 32, 33, 1000}) {
    const int64_t words = (dim + 31) / 32, indices[] = {2, 0};
    const std::vector<float> x = random<float>(3 * dim);
    std::vector<float> got = x, want = x;
    std::vector<int32_t> bitmask(2 * words);
    for (int32_t& word : bitmask) word = int32_t(generator());
    for (int64_t i = 0; i < 2 * dim; i++)
      if (!(uint32_t(bitmask[i / dim * words + i % dim / 32]) >> i % dim % 32 & 1))
        want[indices[i / dim] * dim + i % dim] = -INFINITY;
    kernels().apply_bitmask({got.data(), dim, 3, bitmask.data(), words, indices, 2, dim});
    check(same(got, want), "apply_bitmask of %d", int(dim));
  }
}

}  // namespace
