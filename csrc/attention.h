// Attention over a paged KV cache, for prefill chunks, decode rows and the whole texts of encoders.
//
// The cache is [num_blocks][2][kv_heads][block_size * head_size]; blocks may be further apart than
// they are long. A block's values are stored as
// [block_size][head_size]; its keys are transposed, [head_size][block_size], so that one vector
// holds one dimension of W keys and a score needs no sum across lanes. bfloat16 keys interleave
// pairs of dimensions, [head_size / 2][block_size][2], for the dot product of AVX-512. The last one
// of an odd number is stored alone, [block_size].
//
// A cache of latents (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434) has one row for
// each token, [num_blocks][block_size * head_size]: the key of all heads, whose first numbers are
// the value. Tile registers read the rows as the left factor; otherwise each tile's keys are
// transposed first.
//
// Values may have fewer numbers than keys. They are stored at the distances of keys; the numbers
// between them are never used.
//
// A row is one query head of one token. It iterates over its visible positions in tiles of kTile,
// cut at absolute positions, with the online softmax of Milakov and Gimelshein (arXiv:1805.02867).
// Every kSegment positions it starts anew. The segments are then folded together in order (Dao et
// al., "Flash-Decoding"), so that threads can share a long context. A row's result depends on tiles
// and segments only, not on the other rows or the thread: a decode row and the same row within a
// prefill chunk have the same bits.
//
// If the processor has tile registers, bfloat16 uses them (attention_tiles.h) for any number of
// rows. Only the kernels for the two products and the tile sizes differ.
#pragma once
#include "attention_rows.h"

OCTAVO_BEGIN

constexpr int64_t kPartsNbytes = 64 << 20;  // of shared segments at a time, if one task needs less
constexpr int kFoldedRows = 8;  // rows whose shared segments a thread folds at a time
constexpr int kSharedRows = 36;  // maximum number of rows for sharing segments

// List of tasks. Task i of request r: row tile i % n of KV head i / n, of n tiles, so that successive
// tasks find the keys and values of their head in a cache of the processor.
struct Tasks {
  const AttentionArgs& a;
  const int64_t group;
  int64_t* first;  // tasks of request r: [first[r], first[r + 1])
  double cost;

  Tasks(const AttentionArgs& args, int64_t tile_rows)
      : a(args), group(a.heads / a.kv_heads),
        first(static_cast<int64_t*>(scratch((a.num_reqs + 1) * sizeof(int64_t)))), cost(0) {
    first[0] = 0;
    for (int64_t r = 0; r < a.num_reqs; r++) {
      const int64_t rows = rows_of(r);
      first[r + 1] = first[r] + ceil_div(rows, tile_rows) * a.kv_heads;
      cost += double(rows) * a.seq_lens[r] * a.kv_heads * a.head_size / W;
    }
  }

  int64_t rows_of(int64_t r) const {
    return (a.query_start_loc[r + 1] - a.query_start_loc[r]) * group;
  }
  int64_t tiles_of(int64_t r) const { return (first[r + 1] - first[r]) / a.kv_heads; }
  int64_t request_of(int64_t task) const {
    int64_t low = 0, high = a.num_reqs;
    while (high - low > 1) (first[(low + high) / 2] <= task ? low : high) = (low + high) / 2;
    return low;
  }
};

// For few rows over long contexts: threads share the segments of some tasks at a time. `rows`: the
// most rows of a task. `parts`: see run_segment.
template <class T, class C>
void attend_by_segment(const AttentionArgs& a, const Tasks& tasks, int64_t longest, int64_t rows) {
  const Attention<T, C> attention(a);
  const int64_t stride = rows * (attention.acc_stride + 2), groups = ceil_div(rows, kFoldedRows);
  const int64_t segments = ceil_div(longest, kSegment), num_tasks = tasks.first[a.num_reqs];
  const int64_t nbytes = segments * stride * sizeof(float);  // of a task
  const int64_t some = min(num_tasks, max<int64_t>(1, kPartsNbytes / nbytes));
  float* parts = static_cast<float*>(scratch(some * nbytes, 1));
  for (int64_t first = 0; first < num_tasks; first += some) {
    const int64_t count = min(some, num_tasks - first), cost = int64_t(tasks.cost) * count / num_tasks;
    parallel_for(count * segments, cost, [&](int64_t i) {
      const int64_t task = first + i % count, s = i / count, r = tasks.request_of(task);
      if (s * kSegment < a.seq_lens[r])
        attention.run_segment(r, task - tasks.first[r], int(tasks.rows_of(r)), s * kSegment,
                              parts + (i % count * segments + s) * stride);
    });
    parallel_for(count * groups, count * segments * stride / W, [&](int64_t i) {
      const int64_t task = first + i / groups, r = tasks.request_of(task);
      const int64_t row = i % groups * kFoldedRows, end = min<int64_t>(row + kFoldedRows, tasks.rows_of(r));
      if (row < end)
        attention.write_folded(r, task - tasks.first[r], row, int(end - row),
                               parts + i / groups * segments * stride + row * (attention.acc_stride + 2),
                               stride);
    });
  }
}

template <class T, class C>
INLINE void attention_typed(const AttentionArgs& a, T, C) {
  constexpr int kTileRows = Extent<T>::kTileRows;
  const Tasks tasks(a, kTileRows);
  const int64_t num_tasks = tasks.first[a.num_reqs];
  int64_t longest = 0, most_rows = 0;
  for (int64_t r = 0; r < a.num_reqs; r++) {
    longest = max<int64_t>(longest, a.seq_lens[r]);
    most_rows = max(most_rows, tasks.rows_of(r));
  }
  const int64_t shared_rows = a.latent ? kTileRows : kSharedRows;
  if (num_tasks < 4 * num_threads() && most_rows <= shared_rows && longest > kSegment)
    return attend_by_segment<T, C>(a, tasks, longest, most_rows);
  const Attention<T, C> attention(a);
  parallel_for(num_tasks, int64_t(tasks.cost), [&](int64_t i) {
    const int64_t at = num_tasks - 1 - i;  // the last tiles of a prompt take longest: start with them
    const int64_t r = tasks.request_of(at), task = at - tasks.first[r];
    const int64_t first_row = task % tasks.tiles_of(r) * kTileRows;
    const int64_t next = at > 0 ? tasks.request_of(at - 1) : -1;
    attention.run(r, task / tasks.tiles_of(r), first_row,
                  int(min<int64_t>(kTileRows, tasks.rows_of(r) - first_row)), next,
                  at > 0 ? (at - 1 - tasks.first[next]) / tasks.tiles_of(next) : -1);
  });
}

// Calls f with values of the C++ types of a dtype and of a cache.
template <class F>
INLINE void with_types(DType dtype, CacheType cache, F f) {
  with_type(dtype, [&](auto t) {
    switch (cache) {
      case CacheType::same: return f(t, t);
      case CacheType::e4m3: return f(t, e4m3{});
      case CacheType::e5m2: return f(t, e5m2{});
      case CacheType::int8: return f(t, i8{});
    }
  });
}

void attention(const AttentionArgs& a) {
  if (a.query_start_loc[a.num_reqs] == 0) return;
  with_types(a.dtype, a.cache, [&](auto t, auto c) { attention_typed(a, t, c); });
}

template <class T, class C>
INLINE void write_kv_typed(const WriteKvArgs& a, T, C) {
  constexpr int dims = Keys<T>::kDims;
  const int64_t numbers = a.block_size * a.head_size;
  const int64_t head_size = numbers + a.block_size * kScaleBytes<C>;
  parallel_for(a.tokens, a.tokens * a.kv_heads * a.head_size, [&](int64_t token) {
    const int64_t slot = a.slot_mapping[token];
    if (slot < 0) return;
    const int64_t offset = slot % a.block_size;
    C* block = static_cast<C*>(a.kv_cache) + slot / a.block_size * a.kv_block_stride;
    C narrowed[kMaxHeadSize];
    // Returns the source of a head's numbers; stores its scale, if any, after those of the block.
    auto prepare = [&](const T* from, [[maybe_unused]] int64_t size,
                       [[maybe_unused]] C* head) -> const C* {
      if constexpr (std::is_same_v<T, C>) {
        return from;
      } else {
        [[maybe_unused]] const float scale = narrow_head(from, narrowed, size);
        if constexpr (kScaleBytes<C> > 0)
          memcpy(head + numbers + offset * kScaleBytes<C>, &scale, sizeof scale);
        return narrowed;
      }
    };
    for (int64_t h = 0; h < a.kv_heads; h++) {
      C* keys = block + h * head_size;
      const C* key = prepare(
          static_cast<const T*>(a.key) + token * a.key_stride + h * a.key_head_stride, a.head_size,
          keys);
      if (!a.value) {
        memcpy(keys + offset * a.head_size, key, a.head_size * sizeof(C));
        continue;
      }
      int64_t d = 0;
      for (; d + dims <= a.head_size; d += dims)
        memcpy(keys + d * a.block_size + offset * dims, key + d, dims * sizeof(C));
      if (d < a.head_size) keys[d * a.block_size + offset] = key[d];
      C* values = block + (a.kv_heads + h) * head_size;
      const C* value = prepare(
          static_cast<const T*>(a.value) + token * a.value_stride + h * a.value_head_stride,
          a.value_size, values);
      memcpy(values + offset * a.head_size, value, a.value_size * sizeof(C));
    }
  });
}

void write_kv(const WriteKvArgs& a) {
  with_types(a.dtype, a.cache, [&](auto t, auto c) { write_kv_typed(a, t, c); });
}

OCTAVO_END
