// Attention over a cache of blocks.
#pragma once
#include "checks.h"

namespace {

struct Shape {
  int64_t heads, kv_heads, head_size, block_size, window;
  float soft_cap;
  bool alibi, sinks;
  int64_t chunk = 0;
};

template <class T>
struct Requests {
  Shape s;
  CacheType cache;
  std::vector<int64_t> lengths, queries;  // of each request: positions in all, the last of which ask
  std::vector<std::vector<T>> keys, values;  // [length][kv_heads][head_size]
  std::vector<T> query;  // [tokens][heads][head_size]
  std::vector<std::vector<int32_t>> blocks;
  std::vector<float> slopes;
  std::vector<T> sinks;
  Buffer<uint8_t> kv;

  Requests(Shape s, CacheType cache, std::vector<int64_t> lengths, std::vector<int64_t> queries)
      : s(s), cache(cache), lengths(lengths), queries(queries),
        kv(2 * s.kv_heads * s.block_size * cached_size(cache, Type<T>::dtype, s.head_size) * num_blocks()) {
    for (int64_t h = 0; h < s.heads; h++) slopes.push_back(std::ldexp(1.0f, -int(h) - 1));
    for (int64_t h = 0; h < s.heads; h++) sinks.push_back(make<T>(double(3 * h - 2)));
    std::vector<int32_t> order(num_blocks());
    for (size_t i = 0; i < order.size(); i++) order[i] = int32_t(i);
    std::shuffle(order.begin(), order.end(), generator);
    const int64_t width = s.kv_heads * s.head_size;
    for (size_t r = 0; r < lengths.size(); r++) {
      keys.push_back(random<T>(lengths[r] * width)), values.push_back(random<T>(lengths[r] * width));
      blocks.emplace_back();
      std::vector<int64_t> slots;
      for (int64_t i = 0; i < lengths[r]; i++) {
        if (i % s.block_size == 0) blocks[r].push_back(order.back()), order.pop_back();
        slots.push_back(blocks[r].back() * s.block_size + i % s.block_size);
      }
      kernels().write_kv({keys[r].data(), width, s.head_size, values[r].data(), width, s.head_size, kv.data,
                          block_stride(), slots.data(), lengths[r], s.kv_heads, s.head_size, s.head_size, s.block_size,
                          Type<T>::dtype, cache});
      const std::vector<T> q = random<T>(queries[r] * s.heads * s.head_size);
      query.insert(query.end(), q.begin(), q.end());
      for (auto* cached : {&keys[r], &values[r]})  // as the cache holds them
        for (int64_t i = 0; i < lengths[r] * s.kv_heads; i++) as_cached(cached->data() + i * s.head_size);
    }
  }

  int64_t num_blocks() const {
    int64_t n = 3;  // spare blocks
    for (int64_t length : lengths) n += (length + s.block_size - 1) / s.block_size;
    return n;
  }

  std::vector<float> int8_scales;  // of heads of tokens, in the order in which as_cached meets them

  void as_cached(T* head) {
    float most = 0;
    for (int64_t d = 0; d < s.head_size; d++) most = std::max(most, float(std::fabs(get(head[d]))));
    for (int64_t d = 0; d < s.head_size; d++) {
      const double v = get(head[d]);
      if (cache == CacheType::e4m3 || cache == CacheType::e5m2) {
        const Float f = cache == CacheType::e4m3 ? kE4m3 : kE5m2;
        head[d] = make<T>(value_of(code_of(v, f), f));
      } else if (cache == CacheType::int8) {
        head[d] = make<T>(std::nearbyint(float(v) * (127.0f / most)));
      }
    }
    if (cache == CacheType::int8) int8_scales.push_back(most / 127.0f);
  }

  // Requests first ... first + count, of which each leaves out its last `fewer` queries and positions.
  std::vector<T> run(int64_t first, int64_t count, int64_t fewer = 0) const {
    std::vector<int32_t> start = {0}, seq, table;
    size_t wide = 0;
    int64_t token = 0;
    for (const auto& b : blocks) wide = std::max(wide, b.size());
    std::vector<T> q;
    for (int64_t r = 0; r < first + count; r++) {
      if (r >= first) {
        const int64_t some = queries[r] - fewer;
        q.insert(q.end(), query.begin() + token * s.heads * s.head_size,
                 query.begin() + (token + some) * s.heads * s.head_size);
        start.push_back(start.back() + int32_t(some)), seq.push_back(int32_t(lengths[r] - fewer));
        table.insert(table.end(), blocks[r].begin(), blocks[r].end());
        table.resize(seq.size() * wide, 1 << 30);
      }
      token += queries[r];
    }
    std::vector<T> out(q.size());
    const int64_t width = s.heads * s.head_size;
    kernels().attention({q.data(), width, s.head_size, out.data(), width, s.head_size, kv.data, block_stride(),
                         start.data(), seq.data(), table.data(), int64_t(wide), count, s.heads, s.kv_heads, s.head_size,
                         s.head_size, s.block_size, false, true, s.window, s.chunk, scale(), s.soft_cap,
                         s.alibi ? slopes.data() : nullptr, nullptr, 0, nullptr, nullptr, 0, 0, nullptr, 0,
                         s.sinks ? sinks.data() : nullptr, nullptr, Type<T>::dtype, cache});
    return out;
  }

  // From a block of the cache to the next, in elements
  int64_t block_stride() const {
    const int64_t nbytes = cached_size(cache, Type<T>::dtype, s.head_size);
    return 2 * s.kv_heads * s.block_size * nbytes / (cache == CacheType::same ? size_of(Type<T>::dtype) : 1);
  }

  float scale() const { return 1 / std::sqrt(float(s.head_size)); }

  void check_all() const {
    const std::vector<T> out = run(0, int64_t(lengths.size()));
    int64_t at = 0, scales_before = 0;
    for (size_t r = 0; r < lengths.size(); r++) {
      for (int64_t i = 0; i < queries[r]; i++)
        for (int64_t h = 0; h < s.heads; h++, at += s.head_size)
          check_row(r, i, h, scales_before, out.data() + at, at);
      scales_before += 2 * lengths[r] * s.kv_heads;
    }
  }

  void check_row(size_t r, int64_t i, int64_t h, int64_t scales_before, const T* out, int64_t at) const {
    const int64_t position = lengths[r] - queries[r] + i, kv_head = h / (s.heads / s.kv_heads);
    const int64_t first = s.chunk    ? position / s.chunk * s.chunk
                          : s.window ? std::max<int64_t>(0, position - s.window + 1)
                                     : 0;
    std::vector<double> p, sum(s.head_size);
    double most = -INFINITY, total = 0, size = 0;
    auto scale_of = [&](int64_t j, bool value) -> double {
      if (cache != CacheType::int8) return 1;
      return int8_scales[scales_before + (value ? lengths[r] * s.kv_heads : 0) + j * s.kv_heads + kv_head];
    };
    for (int64_t j = first; j <= position; j++) {
      double dot = 0;
      for (int64_t d = 0; d < s.head_size; d++)
        dot += get(query[at + d]) * get(keys[r][(j * s.kv_heads + kv_head) * s.head_size + d]);
      dot *= scale_of(j, false) * scale();
      if (s.soft_cap != 0) dot = s.soft_cap * std::tanh(dot / s.soft_cap);
      if (s.alibi) dot += slopes[h] * double(j - position);
      p.push_back(dot), most = std::max(most, dot);
    }
    if (s.sinks) most = std::max(most, get(sinks[h])), total = std::exp(get(sinks[h]) - most);
    for (int64_t j = first; j <= position; j++) {
      const double e = std::exp(p[j - first] - most);
      total += e;
      for (int64_t d = 0; d < s.head_size; d++) {
        const double v = get(values[r][(j * s.kv_heads + kv_head) * s.head_size + d]) * scale_of(j, true);
        sum[d] += e * v, size = std::max(size, std::fabs(v));
      }
    }
    // With bfloat16 the probabilities may be, too.
    const double error = std::is_same_v<T, bf16> ? 0x1p-7 * size : 1e-5 * (1 + size);
    for (int64_t d = 0; d < s.head_size; d++) {
      const double want = sum[d] / total;
      check(std::fabs(get(out[d]) - want) <= error + 2 * rounding<T>() * std::fabs(want),
            "attention %s, cache %d, head size %d, block %d, window %d, request %d, query %d, head %d: "
            "%g, not %g",
            Type<T>::name, int(cache), int(s.head_size), int(s.block_size), int(s.window), int(r), int(i),
            int(h), get(out[d]), want);
    }
  }

  void check_alone() const {
    const int64_t width = s.heads * s.head_size;
    std::vector<T> all = run(0, int64_t(lengths.size())), alone;
    for (int64_t r = 0; r < int64_t(lengths.size()); r++)
      for (T v : run(r, 1)) alone.push_back(v);
    check(same(all, alone), "attention %s, cache %d: requests alone differ", Type<T>::name, int(cache));
    set_num_threads(3);
    check(same(run(0, int64_t(lengths.size())), all), "attention %s: on 3 threads", Type<T>::name);
    set_num_threads(2);
    // The first query of the longest prompt, by itself
    const int64_t fewer = queries[0] - 1;
    check(same(run(0, 1, fewer), std::vector<T>(all.begin(), all.begin() + width)),
          "attention %s, cache %d: one query differs from the same among others", Type<T>::name, int(cache));
  }
};

void test_attention() {
  const Shape shapes[] = {{4, 2, 64, 16, 0, 0, false, true},
                          {3, 1, 33, 8, 0, 0, true, false},
                          {2, 2, 40, 32, 70, 0, false, true},
                          {6, 2, 16, 64, 0, 2.5f, false, false},
                          {2, 1, 80, 128, 9, 0, true, false},
                          {2, 1, 32, 8, 0, 0, false, true, 41}};
  const CacheType caches[] = {CacheType::same, CacheType::e4m3, CacheType::e5m2, CacheType::int8};
  for_types([&](auto t) {
    using T = decltype(t);
    for (CacheType cache : caches)
      for (const Shape& shape : shapes) {
        if (cache != CacheType::same && shape.kv_heads > 1 && shape.head_size < 64) continue;  // takes long
        const Requests<T> requests(shape, cache, {70, 1, 131, 65, 7}, {20, 1, 1, 3, 7});
        requests.check_all();
        requests.check_alone();
      }
    // Segments that threads share
    const Requests<T> requests({2, 1, 24, 16, 0, 0, false, true}, CacheType::same, {1100}, {2});
    requests.check_all();
    requests.check_alone();
  });
}

}  // namespace
