// Sampling of one token for each row of logits: the winner of an exponential race.
//
// Token i of weight w arrives after -log(u) / w, u being its random number in (0, 1). The first to
// arrive is drawn with a probability proportional to w (the Gumbel-max trick, without a second
// logarithm: C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", 2014, section 2). As each token
// keeps its number, two similar distributions mostly draw the same token: the draft model and the
// target agree.
//
// A weight is floor(2^40 * exp((logit - max) / temperature)): whole numbers, so that their sums are
// exact in any order. The filters are min-p, then top-k, then top-p of the rest. They rank tokens
// by value descending, then by id ascending, and each keeps a prefix of that ranking. To find its
// end without sorting the vocabulary, tokens are first counted in buckets of logits (a radix select
// of one digit); only the bucket in which a filter ends is sorted.
#pragma once
#include "softmax.h"

OCTAVO_BEGIN

constexpr int kBuckets = 1024;
constexpr float kBucketsPerUnit = 32.0f;  // per unit of (max - logit) / temperature
constexpr float kOne = 0x1p40f;
constexpr float kSlack = 1.0001f;  // allows for rounding

constexpr int kGroup = 64;  // tokens with the random numbers of 16 neighbouring counters

// Returns the maximum of a row; NaN if the row has one.
INLINE float row_max_or_nan(const float* x, int64_t dim) {
  vf m = splat(-INFINITY), nan{};
  for_lanes(dim, [&](int64_t i, int n) {
    vf v = load(x + i, n);
    v = lanes() < float(n) ? v : m;
    nan = v == v ? nan : splat(1.0f);
    m = vmax(v, m);
  });
  return reduce_max(nan) > 0.0f ? NAN : reduce_max(m);
}

void row_max(const RowMaxArgs& a) {
  parallel_for(a.rows, a.rows * a.dim / W * 4, [&](int64_t row) {
    a.out[row] = row_max_or_nan(a.x + row * a.x_stride, a.dim);
  });
}

// Sets numbers without a bit in the bitmask to -inf.
void apply_bitmask(const BitmaskArgs& a) {
  vu bit;
  for (int i = 0; i < W; i++) bit[i] = 1u << i;
  parallel_for(a.rows, a.rows * a.dim / W, [&](int64_t row) {
    const int32_t* words = a.bitmask + row * a.bitmask_stride;
    if (a.indices[row] < 0 || a.indices[row] >= a.x_rows) return;
    float* x = a.x + a.indices[row] * a.x_stride;
    for (int64_t from = 0; from < a.dim; from += 32) {
      const uint32_t kept = uint32_t(words[from / 32]);
      if (kept == ~0u) continue;  // common within a string
      for (int64_t i = from; i < min(from + 32, a.dim); i += W) {
        const int n = int(min<int64_t>(W, a.dim - i));
        store(x + i, (bit & kept >> (i - from)) != 0u ? load(x + i, n) : splat(-INFINITY), n);
      }
    }
  });
}

// Orders by value, then by lower id: the greater key ranks first.
INLINE uint64_t rank_key(float value, int64_t id) {
  const float plain = value + 0.0f;  // -0 ranks like 0
  uint32_t bits;
  memcpy(&bits, &plain, sizeof bits);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(bits) << 32 | uint32_t(~uint32_t(id));
}
INLINE int64_t id_of(uint64_t key) { return int64_t(uint32_t(~uint32_t(key))); }

// Multiplies each lane by b; returns two halves.
INLINE void multiply(vu a, uint32_t b, vu& high, vu& low) {
  const vl even = multiply_even(a, b), odd = multiply_even((vu)((vl)a >> 32), b);
  low = (vu)((even & 0xFFFFFFFFull) | odd << 32);
  high = (vu)(even >> 32 | (odd & ~0xFFFFFFFFull));
}

class Choice {
 public:
  Choice(const SampleArgs& a, int64_t row)
      : params_(a.params[row]), x_(a.x + row * a.x_stride), dim_(a.dim) {}

  int64_t token() {
    const float m = row_max_or_nan(x_, dim_);
    if (!(m < INFINITY && m > -INFINITY)) return -1;
    if (params_.temperature == 0.0f) {
      int64_t i = 0;
      while (x_[i] != m) i++;
      return i;
    }
    // Per token 8 bytes for the keys of a bucket, 4 for the exponential, 2 for the bucket
    char* memory = static_cast<char*>(scratch(size_t(dim_ + kGroup) * 14));
    keys_ = reinterpret_cast<uint64_t*>(memory);
    probs_ = reinterpret_cast<float*>(memory + (dim_ + kGroup) * 8);
    bucket_ = reinterpret_cast<uint16_t*>(memory + (dim_ + kGroup) * 12);
    const bool ranked = params_.top_k > 0 || params_.top_p < 1.0;
    exponentials(m, ranked);
    if (ranked) filter();
    return first_to_arrive();
  }

 private:
  int64_t weight(int64_t i) const { return int64_t(probs_[i] * kOne); }

  void exponentials(float m, bool ranked) {
    const vf temperature = splat(params_.temperature), min_p = splat(params_.min_p);
    const float scale = min(kBucketsPerUnit / params_.temperature, 1e30f);
    for_lanes(dim_, [&](int64_t i, int n) {
      const vf v = load(x_ + i, n);
      vf p = exp((v - m) / temperature);
      p = p < min_p ? vf{} : p;
      store(probs_ + i, p, n);
      if (!ranked) return;
      const vf at = clamp((m - v) * scale, 0.0f, float(kBuckets - 1));
      const vh narrow = __builtin_convertvector(__builtin_convertvector(at, vi), vh);
      memcpy(bucket_ + i, &narrow, n * sizeof(uint16_t));
    });
  }

  // Sets the exponential of tokens that top-k or top-p excludes to zero.
  void filter() {
    memset(sums_, 0, sizeof sums_), memset(counts_, 0, sizeof counts_);
    for (int64_t i = 0; i < dim_; i++) sums_[bucket_[i]] += weight(i), counts_[bucket_[i]]++;
    last_bucket_ = kBuckets - 1, last_key_ = 0;
    if (params_.top_k > 0) keep_top_k(params_.top_k);
    if (params_.top_p < 1.0) keep_top_p(params_.top_p);
    for (int64_t i = 0; i < dim_; i++)
      if (!kept(i)) probs_[i] = 0.0f;
  }

  // Few tokens need a logarithm: -log(u) is at least 1 - u, and that is too late for most.
  int64_t first_to_arrive() {
    for (int64_t i = dim_; i % kGroup; i++) probs_[i] = 0.0f;
    double first = INFINITY;
    // The most probable token arrives before -log of the smallest u.
    float bound = kSlack * 23.0f;
    int64_t token = -1;
    for (int64_t from = 0; from < dim_; from += kGroup) {
      vf most = load(probs_ + from);
      UNROLL for (int i = W; i < kGroup; i += W) most = vmax(most, load(probs_ + from + i));
      if (!(reduce_max(most) * bound >= 0x1p-33f)) continue;  // minimum of 1 - u
      UNROLL for (int lane = 0; lane < kGroup / 4; lane += W) {
        vu words[4];
        philox(uint32_t(from / 4 + lane), words);
        UNROLL for (int word = 0; word < 4; word++) {
          const int64_t at = from + word * (kGroup / 4) + lane;
          // 1 - u, rounded down
          const vf least = __builtin_convertvector((vi)(words[word] >> 8), vf) * 0x1p-24f;
          const vi in_time = least <= load(probs_ + at) * bound;
          if (!any(in_time)) continue;
          for (int i = 0; i < W; i++) {
            const int64_t w = in_time[i] ? weight(at + i) : 0;
            if (w == 0) continue;
            const double u = 1.0 - (double(words[word][i]) + 0.5) * 0x1p-32;
            const double arrives = -std::log(u) / double(w);
            if (arrives > first || (arrives == first && at + i > token)) continue;
            first = arrives, token = at + i;
            bound = float(first * kOne) * kSlack;
          }
        }
      }
    }
    return token;
  }

  // Computes Philox4x32-10 (philox.h) for the counters (position, stream, block + lane, 0).
  INLINE void philox(uint32_t block, vu out[4]) const {
    vu c[4] = {vu{} + params_.position, vu{} + params_.stream, (vu)iota() + block, vu{}};
    uint32_t key[2] = {uint32_t(params_.seed), uint32_t(params_.seed >> 32)};
    UNROLL for (int round = 0; round < 10; round++) {
      vu high0, low0, high1, low1;
      multiply(c[0], 0xD2511F53u, high0, low0);
      multiply(c[2], 0xCD9E8D57u, high1, low1);
      c[0] = high1 ^ c[1] ^ key[0], c[1] = low1;
      c[2] = high0 ^ c[3] ^ key[1], c[3] = low0;
      key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    memcpy(out, c, sizeof c);
  }

  bool kept(int64_t i) const {
    return bucket_[i] < last_bucket_ ||
           (bucket_[i] == last_bucket_ && rank_key(x_[i], i) >= last_key_);
  }

  // Sorts the kept tokens of bucket b by rank; returns their number.
  int64_t sort_bucket(int b) {
    int64_t count = 0;
    for (int64_t i = 0; i < dim_; i++)
      if (bucket_[i] == b && kept(i)) keys_[count++] = rank_key(x_[i], i);
    sort_descending(keys_, count);
    return count;
  }

  // Ends bucket b after its first `count` keys.
  void end_in(int b, int64_t count) {
    last_bucket_ = b, last_key_ = keys_[count - 1];
    sums_[b] = 0;
    for (int64_t i = 0; i < count; i++) sums_[b] += weight(id_of(keys_[i]));
  }

  void keep_top_k(int64_t k) {
    int b = 0;
    while (b < kBuckets - 1 && counts_[b] < k) k -= counts_[b++];
    const int64_t count = sort_bucket(b);
    if (k <= count) end_in(b, k);
  }

  void keep_top_p(double top_p) {
    int64_t total = 0, before = 0;
    for (int b = 0; b <= last_bucket_; b++) total += sums_[b];
    const double limit = top_p * double(total);
    int b = 0;
    while (b < last_bucket_ && double(before + sums_[b]) < limit) before += sums_[b++];
    const int64_t count = sort_bucket(b);
    int64_t keep = 0;  // a token stays while the weights before it are below the limit
    while (keep < count && double(before) < limit) before += weight(id_of(keys_[keep++]));
    if (keep > 0) end_in(b, keep);
  }

  const SamplingRow& params_;
  const float* x_;
  const int64_t dim_;
  uint64_t* keys_ = nullptr;
  float* probs_ = nullptr;
  uint16_t* bucket_ = nullptr;
  int64_t sums_[kBuckets];
  int64_t counts_[kBuckets];
  int last_bucket_ = 0;
  uint64_t last_key_ = 0;
};

void sample(const SampleArgs& a) {
  parallel_for(a.rows, a.rows * a.dim, [&](int64_t row) {
    Choice choice(a, row);
    a.out[row] = choice.token();
  });
}

OCTAVO_END
