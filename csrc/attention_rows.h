// Attention of some rows of one request and one head of keys and values: they iterate over the tiles of
// the cache together. See attention.h for the layout of the cache and the order of the sums.
#pragma once
#include "attention_vectors.h"
#include "kv_format.h"
#include "norm.h"

OCTAVO_BEGIN

constexpr int kSegment = 512;  // positions with separate sums, so that threads can share them

// A query head of a token, with the positions that it sees.
struct Row {
  int64_t token;
  int first, last;  // visible positions of the current tile
  int64_t position, head;
  int64_t begin, end;  // visible positions
  float slope;
  const float* bias;  // of position_bias, at distance 0
  float max, sum;  // of the current segment, see Partial
};

// Result of a row for some positions, without the values: largest logit, in units of ln 2, and sum of
// exponentials relative to it.
struct Partial {
  float max, sum;
};

// total += part, which follows it
INLINE void fold(Partial& total, float* total_acc, const Partial& part, const float* acc,
                 int64_t acc_stride) {
  if (part.max == -INFINITY) return;  // no visible position
  if (total.max == -INFINITY) {
    total = part;
    memcpy(total_acc, acc, acc_stride * sizeof(float));
    return;
  }
  const float m = max(total.max, part.max);
  const float old = exp2_or_zero(splat(total.max - m))[0];
  const float now = exp2_or_zero(splat(part.max - m))[0];
  total = {m, total.sum * old + part.sum * now};
  for (int64_t d = 0; d < acc_stride; d += W)
    store(total_acc + d, fma(load(total_acc + d), splat(old), load(acc + d) * now));
}

// Attention for rows of type T and a cache of type C, which is T or a byte.
template <class T, class C>
struct Attention {
  static constexpr int kTile = Extent<T>::kTile, kTileRows = Extent<T>::kTileRows;
  static constexpr int kStepRows = Extent<T>::kStepRows, kFewRows = Extent<T>::kFewRows;
  using Sums = std::conditional_t<kOnTiles<T>, OnTiles<T>, Values<T>>;
  using Q = std::conditional_t<kOnTiles<T>, T, typename Keys<T>::Q>;
  using P = typename Sums::P;
  static constexpr bool kBytes = !std::is_same_v<T, C>, kScales = kScaleBytes<C> > 0;
  const AttentionArgs& a;
  const int64_t group, acc_stride, kv_head_size, kv_block;
  const int64_t query_stride;  // for tile registers padded to whole steps
  const int64_t span;  // adjacent positions of a tile
  const int block_shift;  // block sizes are powers of two
  const int64_t key_stride;  // distance of the keys of successive steps of dimensions, in steps
  const bool plain;  // logits are products times a scale
  const float unit;  // factor of plain products, or of other logits, that makes them powers of two

  explicit Attention(const AttentionArgs& args)
      : a(args),
        group(a.heads / a.kv_heads),
        acc_stride(ceil_div(a.value_size, 2 * W) * 2 * W),
        kv_head_size(a.block_size * (a.head_size + kScaleBytes<C>)),
        kv_block(a.kv_block_stride),
        query_stride(kOnTiles<T> ? ceil_div(a.head_size, 2 * W) * 2 * W : a.head_size),
        span(min<int64_t>(kTile, a.block_size)),
        block_shift(__builtin_ctzll(a.block_size)),
        key_stride(a.latent ? kTile : kBytes ? span : a.block_size),
        plain(!kScales && !a.product_columns && a.soft_cap == 0.0f && !a.alibi_slopes &&
              !a.position_bias && a.scale > 0.0f),
        unit(plain ? a.scale * kLog2E : kLog2E) {}

  // Pointers to the keys and values of a tile; of latents to the rows, as values.
  struct Tile {
    const T* keys[kTile / 4];
    const T* values[kTile];
    int extent;  // positions whose places are known: half a tile is enough for a short text
  };
  // Variant for bytes: this head of the blocks that contain the spans.
  struct Blocks {
    const C* heads[kTile / 8];
  };
  using Place = std::conditional_t<kBytes, Blocks, Tile>;

  // A tile of bytes as numbers of type T: keys [kTile / span], each stored like a block of span
  // positions; values or latents [kTile][head_size].
  struct Widened {
    T* keys;
    T* values;
    Tile tile;
    alignas(64) float key_scales[kTile];
    alignas(64) float value_scales[kTile];
  };
  struct Nothing {};

  // Some rows of a request's query_len * group for one KV head, with their buffers.
  struct Task {
    int64_t request, kv_head, first_row;
    int64_t length;  // positions of the request that its rows may see
    int count;
    int64_t begin, end;  // positions visible to any of the rows
    int64_t next_request, next_kv_head;  // likely next task of this thread; -1: none
    Row rows[kTileRows];
    alignas(64) Q query[kTileRows * kMaxHeadSize];
    alignas(64) float scores[kStepRows * kTile];
    alignas(64) P probs[kStepRows * kTile];
    alignas(64) float sums[kTileRows * W];  // lane by lane, of the current segment's probabilities
    alignas(64) float acc[kTileRows * kMaxHeadSize];
    T* keys;  // buffer for transposed latents, for vectors
    std::conditional_t<kBytes, Widened, Nothing> wide;
    std::conditional_t<kOnTiles<T>, OnTiles<T>, Nothing> on_tiles;
  };

  void start(Task& t, int64_t request, int64_t kv_head, int64_t first_row, int count) const {
    t.request = request, t.kv_head = kv_head, t.first_row = first_row, t.count = count;
    t.next_request = t.next_kv_head = -1;
    const int64_t start = a.query_start_loc[request];
    const int64_t query_len = a.query_start_loc[request + 1] - start;
    t.length = a.seq_lens[request];
    const int64_t position0 = a.causal ? t.length - query_len : 0;
    if constexpr (kOnTiles<T>) memset(t.query, 0, padded(count) * query_stride * sizeof(Q));
    for (int i = 0; i < count; i++) {
      const int64_t token = (first_row + i) / group, head = head_of(t, i);
      const int64_t biases = head * (2 * a.bias_distance + 1) + a.bias_distance;
      const int64_t position = position0 + token;
      t.rows[i] = {start + token, 0, 0, position, head, first_visible(position), end_visible(t, position),
                   a.alibi_slopes ? a.alibi_slopes[head] : 0.0f,
                   a.position_bias ? a.position_bias + biases : nullptr, -INFINITY, 0.0f};
      if (a.ranges) widen(t.rows[i]);
      const T* q = static_cast<const T*>(a.query) + t.rows[i].token * a.query_stride +
                   head * a.query_head_stride;
      if constexpr (std::is_same_v<Q, T>)
        memcpy(t.query + i * query_stride, q, a.head_size * sizeof(T));
      else
        for_lanes(a.head_size,
                  [&](int64_t d, int n) { store(t.query + i * query_stride + d, load(q + d, n), n); });
    }
    if constexpr (kOnTiles<T>)
      if (a.latent) OnTiles<T>::pair_queries(t.query, padded(count), query_stride);
    t.begin = t.rows[0].begin;
    t.end = t.rows[count - 1].end;
    const int64_t widened = kBytes || (a.latent && !kOnTiles<T>) ? 2 * kTile * a.head_size : 0;
    const int64_t on_tiles = kOnTiles<T> ? kTile * (query_stride + acc_stride) : 0;
    T* buffer = static_cast<T*>(scratch((widened + on_tiles) * sizeof(T), 2));
    t.keys = buffer;
    if constexpr (kBytes) {
      t.wide.keys = buffer;
      t.wide.values = buffer + kTile * a.head_size;
      const int64_t lanes_of_keys = min<int64_t>(W, a.block_size);
      for (int64_t i = 0; i < kTile; i += lanes_of_keys)
        t.wide.tile.keys[i / lanes_of_keys] =
            t.wide.keys + i / span * span * a.head_size + i % span * Keys<T>::kDims;
      for (int64_t i = 0; i < kTile; i++) t.wide.tile.values[i] = t.wide.values + i * a.head_size;
    }
    if constexpr (kOnTiles<T>) {
      t.on_tiles.keys = buffer + widened;
      t.on_tiles.values = t.on_tiles.keys + kTile * query_stride;
      memset(t.probs, 0, sizeof t.probs);
    }
  }

  // First position that a query sees, without its range.
  int64_t first_visible(int64_t position) const {
    if (a.chunk) return position / a.chunk * a.chunk;
    return a.window ? max<int64_t>(0, position - a.window + 1) : 0;
  }

  // End of the positions that a query sees, without its range.
  int64_t end_visible(const Task& t, int64_t position) const {
    if (a.causal) return position + 1;
    return a.window ? min(position + a.window, t.length) : t.length;
  }

  // Lets a row see its range. Later rows of a request begin and end no earlier than the row.
  void widen(Row& row) const {
    const int32_t* range = a.ranges + 2 * row.token;
    row.begin = max<int64_t>(0, min<int64_t>(row.begin, range[0]));
    row.end = max<int64_t>(row.end, range[1]);
  }

  // Number of rows that are computed: tile registers process 16 at a time.
  static int padded(int rows) { return kOnTiles<T> ? (rows + 15) / 16 * 16 : rows; }

  int64_t head_of(const Task& t, int row) const {
    return t.kv_head * group + (t.first_row + row) % group;
  }

  // Locates positions [begin, end) of the tile. Blocks without a visible position may not exist: a
  // block with one replaces them.
  void locate(Tile& to, int64_t request, int64_t kv_head, int64_t tile, int64_t begin,
              int64_t end) const {
    const int32_t* blocks = a.block_table + request * a.block_table_stride;
    const int64_t lanes_of_keys = min<int64_t>(W, a.block_size);
    const int64_t values = a.latent ? 0 : a.kv_heads * kv_head_size;
    const T** keys = to.keys;
    static_assert(kOnTiles<T> || kTile / 2 % (kScoreVectors * W) == 0);
    to.extent = !kOnTiles<T> && end - tile <= kTile / 2 ? kTile / 2 : kTile;
    for (int64_t i = 0; i < to.extent; i += lanes_of_keys) {
      const int64_t position = min(max(tile + i, begin), end - 1);
      const int64_t offset = (tile + i) & (a.block_size - 1);
      const T* block = static_cast<const T*>(a.kv_cache) +
                       blocks[position >> block_shift] * kv_block + kv_head * kv_head_size;
      *keys++ = block + offset * Keys<T>::kDims;
      const T* value = block + values + offset * a.head_size;
      for (int64_t j = 0; j < lanes_of_keys; j++, value += a.head_size) to.values[i + j] = value;
    }
  }

  void locate(Blocks& to, int64_t request, int64_t kv_head, int64_t tile, int64_t begin,
              int64_t end) const {
    const int32_t* blocks = a.block_table + request * a.block_table_stride;
    for (int64_t i = 0; i < kTile; i += span) {
      const int64_t position = min(max(tile + i, begin), end - 1);
      to.heads[i / span] = static_cast<const C*>(a.kv_cache) +
                          blocks[position >> block_shift] * kv_block + kv_head * kv_head_size;
    }
  }

  // Widens the spans of a tile that overlap [begin, end).
  void widen_tile(Widened& to, const Blocks& here, const Blocks* next, int64_t tile, int64_t begin,
                  int64_t end) const {
    constexpr int dims = Keys<T>::kDims;
    const int64_t values = a.latent ? 0 : a.kv_heads * kv_head_size;
    const int64_t numbers = a.block_size * a.head_size;
    for (int64_t i = 0; i < kTile; i += span) {
      if (tile + i >= end || tile + i + span <= begin) continue;
      const int64_t offset = (tile + i) % a.block_size;
      const C* from = here.heads[i / span];
      auto widen_at = [&](T* widened, int64_t at, int64_t n) {
        widen_all(widened, from + at, next ? next->heads[i / span] + at : nullptr, n);
      };
      T* keys = to.keys + i * a.head_size;
      if (!a.latent && span == a.block_size)
        widen_at(keys, 0, span * a.head_size);
      else if (!a.latent)
        for (int64_t d = 0; d < a.head_size; d += dims) {
          const int64_t some = min<int64_t>(dims, a.head_size - d);
          widen_at(keys + d * span, d * a.block_size + offset * some, span * some);
        }
      widen_at(to.values + i * a.head_size, values + offset * a.head_size, span * a.head_size);
      if constexpr (kScales) {
        const int64_t at = numbers + offset * kScaleBytes<C>, n = span * kScaleBytes<C>;
        memcpy(to.key_scales + i, from + at, n);
        memcpy(to.value_scales + i, from + values + at, n);
        for (int64_t j = 0; next && j < n; j += 64) {
          __builtin_prefetch(next->heads[i / span] + at + j);
          __builtin_prefetch(next->heads[i / span] + values + at + j);
        }
      }
    }
  }

  // Locates the tile after `tile`, of this task or of the next one; returns false if none exists.
  bool locate_next(Place& to, const Task& t, int64_t tile) const {
    if (tile + kTile < t.end) {
      locate(to, t.request, t.kv_head, tile + kTile, tile + kTile, min(t.end, tile + 2 * kTile));
      return true;
    }
    if (t.next_request < 0 || a.window || a.chunk) return false;
    locate(to, t.next_request, t.next_kv_head, 0, 0,
           min<int64_t>(kTile, a.seq_lens[t.next_request]));
    return true;
  }

  // Computes one segment for all rows: leaves max and sum in the rows, values in acc.
  void walk_segment(Task& t, int64_t segment) const {
    for (int i = 0; i < t.count; i++) t.rows[i].max = -INFINITY;
    memset(t.sums, 0, t.count * W * sizeof(float));
    static_assert(kSegment % kTile == 0);
    memset(t.acc, 0, padded(t.count) * acc_stride * sizeof(float));
    const int64_t begin = max(t.begin, segment), end = min(t.end, segment + kSegment);
    Place here{}, next{};
    for (int64_t tile = begin / kTile * kTile; tile < end; tile += kTile) {
      locate(here, t.request, t.kv_head, tile, max(begin, tile), min(end, tile + kTile));
      // Few rows finish a tile before the next one has arrived from memory: prefetch that meanwhile.
      const bool ahead = (t.count <= kFewRows || a.latent) && locate_next(next, t, tile);
      const int64_t from = max(begin, tile), to = min(end, tile + kTile);
      if constexpr (kBytes) {
        widen_tile(t.wide, here, ahead ? &next : nullptr, tile, from, to);
        walk_tile(t, t.wide.tile, nullptr, tile, from, to);
      } else {
        walk_tile(t, here, ahead ? &next : nullptr, tile, from, to);
      }
    }
    for (int i = 0; i < t.count; i++) t.rows[i].sum = reduce_sum(load(t.sums + i * W));
  }

  // Computes positions [begin, end) of a tile: all that are visible to any of the rows.
  void walk_tile(Task& t, const Tile& here, const Tile* next, int64_t tile, int64_t begin,
                 int64_t end) const {
    for (int i = 0; i < t.count; i++) {
      Row& row = t.rows[i];
      row.first = int(min<int64_t>(max(row.begin - tile, int64_t(0)), kTile));
      row.last = int(min<int64_t>(max(row.end - tile, int64_t(0)), kTile));
    }
    if constexpr (kOnTiles<T>)
      walk_on_tiles(t, here, next, tile, int(begin - tile), int(end - tile));
    else
      walk_by_vectors(t, here, next, tile, begin, end);
  }

  void walk_by_vectors(Task& t, const Tile& here, const Tile* next, int64_t tile, int64_t begin,
                       int64_t end) const {
    const int lanes_of_keys = int(min<int64_t>(W, a.block_size));
    const T* const* all_keys = here.keys;
    const T* transposed[kTile / 4];
    if (a.latent) {
      transpose_rows(here.values, int(begin - tile), int(end - tile), a.head_size, kTile, t.keys);
      for (int v = 0; v < kTile / lanes_of_keys; v++)
        transposed[v] = t.keys + v * lanes_of_keys * Keys<T>::kDims;
      all_keys = transposed;
    }
    for (int v = 0; v < kTile / lanes_of_keys; v += kScoreVectors) {
      const int64_t at = tile + v * lanes_of_keys;
      if (at >= end || at + kScoreVectors * lanes_of_keys <= begin) continue;
      const T* const* ahead = next && !a.latent ? next->keys + v : nullptr;
      for (int i = 0; i < t.count; i += kScoreRows, ahead = nullptr) {
        const Q* q = t.query + i * query_stride;
        float* s = t.scores + i * kTile + v * lanes_of_keys;
        const int n = min(kScoreRows, t.count - i);
        auto multiply = [&](auto lanes, auto vectors) {
          score_kernels<T, decltype(lanes)::value, kScoreRows, decltype(vectors)::value>(
              n, q, query_stride, all_keys + v, ahead, at, key_stride, a.head_size, s);
        };
        if (lanes_of_keys < W)
          multiply(Index<W / 2>{}, Index<kScoreVectors>{});
        else if (v > 0 || at + kScoreVectors / 2 * W < end || ahead)
          multiply(Index<W>{}, Index<kScoreVectors>{});
        else  // the rest of a short text
          multiply(Index<W>{}, Index<kScoreVectors / 2>{});
      }
    }
    softmax_rows(t, 0, t.count, next, tile);
    const T* const* ahead = next ? next->values : nullptr;
    for (int i = 0; i < t.count; i += Values<T>::kRows, ahead = nullptr)
      add_values<Values<T>::kRows>(t, min(Values<T>::kRows, t.count - i), i, here.values, ahead);
    if (next) fetch_values(*next, max(kFetchedEarly, t.rows[0].last), next->extent);
  }

  void walk_on_tiles(Task& t, const Tile& here, const Tile* next, int64_t tile, int begin,
                     int end) const {
    using Kernels = OnTiles<T>;
    const T* const* next_keys = next ? next->keys : nullptr;
    const T* keys[kTile / 16];
    int64_t stride = key_stride;
    const bool as_stored = a.block_size >= 16 && a.head_size % 32 == 0;
    if (a.latent) {
      stride = as_stored ? a.head_size : query_stride;
      if (!as_stored)
        Kernels::copy_rows(here.values, begin, end, a.head_size, query_stride, t.on_tiles.keys);
      for (int i = 0; i < kTile / 16; i++)
        keys[i] = as_stored ? here.values[i * 16] : t.on_tiles.keys + i * 16 * query_stride;
    } else if (as_stored) {
      memcpy(keys, here.keys, sizeof keys);
    } else {
      auto copy = a.block_size >= 16 ? Kernels::template copy_keys<16> : Kernels::template copy_keys<8>;
      copy(here.keys, next_keys, stride, begin, end, a.head_size, query_stride, t.on_tiles.keys);
      for (int i = 0; i < kTile / 16; i++) keys[i] = t.on_tiles.keys + i * 16 * query_stride;
      stride = 16, next_keys = nullptr;
    }
    const bool alike = t.rows[0].last == end && t.rows[t.count - 1].first == begin;
    const bool alone = !alike && !Kernels::all_finite(here.values, begin, end, a.value_size);
    auto pair_values = [&](const T* const* ahead, int first, int last) {
      Kernels::pair_values(here.values, ahead, first, last, a.value_size, acc_stride,
                           t.on_tiles.values);
    };
    if (!alone) pair_values(next ? next->values : nullptr, begin, end);
    for (int at = 0; at < t.count; at += kStepRows) {
      const int rows = min(kStepRows, t.count - at);
      const int first = t.rows[at].first, last = t.rows[at + rows - 1].last;
      if (first >= last) continue;  // no visible position
      const Q* q = t.query + at * query_stride;
      float* acc = t.acc + at * acc_stride;
      auto with_groups = [&](auto groups) {
        constexpr int G = decltype(groups)::value;
        if (a.latent)
          Kernels::template row_scores<G>(q, keys, at == 0 && next ? next->values : nullptr, stride,
                                          a.value_size, a.head_size, first, last, query_stride,
                                          t.scores);
        else
          Kernels::template scores<G>(q, keys, next_keys, stride, first, last, query_stride,
                                      t.scores);
        softmax_rows(t, at, rows, nullptr, tile);
        if (!alone)
          Kernels::template add_values<G>(t.probs, kTile, t.on_tiles.values, first, last,
                                          acc_stride, acc, acc_stride);
      };
      if (rows > 16)
        with_groups(Index<2>{});
      else
        with_groups(Index<1>{});
      for (int i = 0; alone && i < rows; i++) {
        const Row& row = t.rows[at + i];
        if (row.first >= row.last) continue;
        pair_values(nullptr, row.first, row.last);
        Kernels::template add_values<1>(t.probs + i * kTile, 0, t.on_tiles.values, row.first,
                                        row.last, acc_stride, acc + i * acc_stride, 0);
      }
    }
  }

  // Turns scores into probabilities, for a step's rows from `at` on, and rescales the previous
  // sums. V: vectors of the tile with a visible position of any row; the others are not touched,
  // since they would only add zeros.
  template <int V = kTile / W>
  void softmax_rows(Task& t, int at, int count, const Tile* next, int64_t tile) const {
    if constexpr (V % 4 == 0)  // vectors are stored in pairs
      if (t.rows[at + count - 1].last <= V / 2 * W)
        return softmax_rows<V / 2>(t, at, count, next, tile);
    softmax_vectors<V>(t, at, count, next, tile);
  }

  // Three passes over the rows, so that no row waits for the maximum and the sum of another.
  template <int V>
  void softmax_vectors(Task& t, int at, int count, const Tile* next, int64_t tile) const {
    constexpr int some = (kStepRows + W - 1) / W * W;
    alignas(64) float old_max[some] = {}, new_max[some] = {};
    for (int i = 0; i < count; i++) {
      Row& row = t.rows[at + i];
      if (next) fetch_values(*next, i * kFetchedEarly / count, (i + 1) * kFetchedEarly / count);
      if (row.first >= row.last) continue;
      old_max[i] = row.max;
      const float most = finish_scores<V>(row, t.wide, tile, t.scores + i * kTile);
      row.max = new_max[i] = max(row.max, most * unit);
    }
    for (int i = 0; i < count; i += W)
      store(old_max + i, exp2_or_zero(load(old_max + i) - load(new_max + i)));
    for (int i = 0; i < count; i++) {
      Row& row = t.rows[at + i];
      P* probs = t.probs + i * kTile;
      if (row.first < row.last)
        softmax_step<V>(row, t.wide, t.scores + i * kTile, old_max[i], probs,
                        t.sums + (at + i) * W, t.acc + (at + i) * acc_stride);
      else if constexpr (kOnTiles<T>)
        memset(probs, 0, kTile * sizeof(P));
    }
  }

  void fetch_values(const Tile& next, int from, int to) const {
    for (int key = from; key < min(to, next.extent); key++)
      for (int64_t d = 0; d < a.head_size; d += 64 / sizeof(T))
        __builtin_prefetch(next.values[key] + d);
  }

  // Keeps v at visible positions of the tile, and sets `instead` elsewhere.
  template <int V>
  static INLINE void hide(const Row& row, vf (&v)[V], float instead) {
    for (int i = 0; i < V; i++) {
      const vf key = lanes() + float(i * W);
      v[i] = key >= float(row.first) ? v[i] : splat(instead);
      v[i] = key < float(row.last) ? v[i] : splat(instead);
    }
  }
  template <int V>
  static bool sees_all(const Row& row) {
    return row.first == 0 && row.last == V * W;
  }

  // Adds the biases of the positions at distances `from`, `from` + 1 ... of a row.
  template <int V>
  INLINE void add_position_bias(const Row& row, int64_t from, vf (&v)[V]) const {
    const int64_t most = a.bias_distance;
    for (int i = 0; i < V; i++, from += W) {
      const int64_t last = from + W - 1;
      if (from >= most || last <= -most) {
        v[i] += row.bias[from >= most ? most : -most];
      } else if (from >= -most && last <= most) {
        v[i] += load(row.bias + from);
      } else {
        float some[W];
        for (int j = 0; j < W; j++) some[j] = row.bias[min(max(from + j, -most), most)];
        v[i] += load(some);
      }
    }
  }

  // Adds the scaled products of a row's query, and of its visible keys, with the vectors of their
  // distances.
  template <int V>
  INLINE void add_products(const Row& row, int64_t tile, vf (&v)[V]) const {
    const int64_t most = a.product_distance, before = tile - row.position;
    auto add = [&](const void* products, int64_t token, int64_t stride) {
      const T* p = static_cast<const T*>(products) + token * a.products_stride +
                   row.head * a.products_head_stride;
      T some[V * W] = {};
      for (int64_t key = row.first; key < row.last; key++) {
        const int64_t distance = min(max(before + key, -most), most);
        some[key] = p[key * stride + a.product_columns[most + distance]];
      }
      for (int i = 0; i < V; i++) v[i] = fma(a.scale, load(some + i * W), v[i]);
    };
    if (a.query_products) add(a.query_products, row.token, 0);
    if (a.key_products) add(a.key_products, row.token + before, a.products_stride);
  }

  // Turns dot products into logits, unless these are plain, and sets -inf at invisible positions;
  // returns the largest. `wide`: holds the scales of the positions, if any.
  template <int V, class Wide>
  INLINE float finish_scores(const Row& row, const Wide& wide, int64_t tile, float* s) const {
    vf v[V];
    if (plain && sees_all<V>(row)) {
      vf m = load(s);
      UNROLL for (int i = 1; i < V; i++) m = vmax(load(s + i * W), m);
      return reduce_max(m);
    }
    UNROLL for (int i = 0; i < V; i++) {
      v[i] = load(s + i * W);
      if constexpr (kScales) v[i] *= load(wide.key_scales + i * W);
      if (!plain) v[i] *= a.scale;
    }
    if (a.product_columns) add_products(row, tile, v);
    if (a.soft_cap != 0.0f)
      for (int i = 0; i < V; i++) v[i] = soft_cap(v[i], a.soft_cap);
    if (a.alibi_slopes && a.causal)
      for (int i = 0; i < V; i++)
        v[i] = fma(row.slope, lanes() + float(tile + i * W - row.position), v[i]);
    else if (a.alibi_slopes)
      for (int i = 0; i < V; i++) {
        const vf distance = lanes() + float(tile + i * W - row.position);
        v[i] = fma(-row.slope, vmax(distance, -distance), v[i]);
      }
    if (a.position_bias) add_position_bias(row, tile - row.position, v);
    if (!sees_all<V>(row)) hide(row, v, -INFINITY);
    vf m = v[0];
    UNROLL for (int i = 0; i < V; i++) m = vmax(v[i], m), store(s + i * W, v[i]);
    return reduce_max(m);
  }

  // Turns logits into probabilities relative to the maximum; scales the previous sums by `old`.
  template <int V, class Wide>
  INLINE void softmax_step(const Row& row, const Wide& wide, const float* s, float old, P* probs,
                           float* sums, float* acc) const {
    vf v[V], sum = load(sums) * old;
    // A large maximum is rounded by more than a power of two bears: round the others like it.
    if (row.max < 0x1p24f && row.max > -0x1p24f) [[likely]]
      UNROLL for (int i = 0; i < V; i++)
        v[i] = power_of_two<P>(fma(load(s + i * W), splat(unit), splat(-row.max)));
    else
      UNROLL for (int i = 0; i < V; i++) v[i] = power_of_two<P>(load(s + i * W) * unit - row.max);
    UNROLL for (int i = 0; i < V; i += 2) sum += v[i] + v[i + 1];
    store(sums, sum);
    if constexpr (kScales) {
      UNROLL for (int i = 0; i < V; i++) v[i] *= load(wide.value_scales + i * W);
      if (!sees_all<V>(row)) hide(row, v, 0.0f);  // a scale there may be NaN
    }
    UNROLL for (int i = 0; i < V; i += 2) keep(probs + i * W, v[i], v[i + 1]);
    for (int64_t d = 0; d < acc_stride; d += W) store(acc + d, load(acc + d) * old);
  }

  // Adds the values for R rows together at positions visible to all of them, one by one elsewhere.
  // Every row adds only its visible positions, in ascending order.
  template <int R>
  void add_values(Task& t, int rows, int at, const T* const* values, const T* const* next) const {
    if constexpr (R > 1)
      if (rows < R) return add_values<R - 1>(t, rows, at, values, next);
    constexpr int step = Values<T>::kStep;
    const Row* row = t.rows + at;
    const P* p = t.probs + at * kTile;
    float* acc = t.acc + at * acc_stride;
    int first = 0, last = kTile;
    for (int i = 0; i < R; i++) first = max(first, row[i].first), last = min(last, row[i].last);
    first = (first + step - 1) / step * step, last = last / step * step;
    auto alone = [&](int i, int from, int to) {
      Values<T>::add_row(p + i * kTile, values, from, to, a.value_size, acc + i * acc_stride,
                         acc_stride);
    };
    if (first >= last) {
      for (int i = 0; i < R; i++) alone(i, row[i].first, row[i].last);
      return;
    }
    for (int i = 0; i < R; i++) alone(i, row[i].first, first);
    Values<T>::template add<R>(p, values, next, first, last, a.value_size, acc, acc_stride);
    for (int i = 0; i < R; i++) alone(i, last, row[i].last);
  }

  void write(const Task& t, int row, const Partial& total, const float* acc) const {
    const int64_t head = head_of(t, row);
    T* out =
        static_cast<T*>(a.out) + t.rows[row].token * a.out_stride + head * a.out_head_stride;
    float sum = total.sum;
    if (a.sinks) {
      const vf sink = load(static_cast<const T*>(a.sinks) + head, 1);
      sum += exp((sink * kLog2E - total.max) * 0.693147181f)[0];
    }
    if (t.rows[row].begin >= t.rows[row].end) sum = 1.0f;  // the result is 0
    Sums::write(acc, sum, out, a.value_size);
  }

  // Computes rows completely.
  NOINLINE void run(int64_t request, int64_t kv_head, int64_t first_row, int count,
                    int64_t next_request, int64_t next_kv_head) const {
    Task t;
    Partial total[kTileRows];
    alignas(64) float acc[kTileRows * kMaxHeadSize];
    start(t, request, kv_head, first_row, count);
    t.next_request = next_request, t.next_kv_head = next_kv_head;
    for (int i = 0; i < count; i++) total[i] = {-INFINITY, 0.0f};
    memset(acc, 0, count * acc_stride * sizeof(float));
    for (int64_t s = t.begin / kSegment * kSegment; s < t.end; s += kSegment) {
      walk_segment(t, s);
      for (int i = 0; i < count; i++)
        fold(total[i], acc + i * acc_stride, {t.rows[i].max, t.rows[i].sum},
             t.acc + i * acc_stride, acc_stride);
    }
    for (int i = 0; i < count; i++) write(t, i, total[i], acc + i * acc_stride);
  }

  // Computes one segment of some rows: into parts, [count] of {max, sum, acc[acc_stride]}.
  NOINLINE void run_segment(int64_t request, int64_t kv_head, int count, int64_t segment,
                            float* parts) const {
    Task t;
    start(t, request, kv_head, 0, count);
    walk_segment(t, segment);
    for (int i = 0; i < count; i++) {
      float* part = parts + i * (acc_stride + 2);
      part[0] = t.rows[i].max, part[1] = t.rows[i].sum;
      memcpy(part + 2, t.acc + i * acc_stride, acc_stride * sizeof(float));
    }
  }

  // Folds and writes rows first_row ... with segments in `parts`, `stride` floats apart.
  NOINLINE void write_folded(int64_t request, int64_t kv_head, int64_t first_row, int count,
                             const float* parts, int64_t stride) const {
    Task t;
    start(t, request, kv_head, first_row, count);
    for (int i = 0; i < count; i++) {
      Partial total = {-INFINITY, 0.0f};
      memset(t.acc, 0, acc_stride * sizeof(float));
      for (int64_t s = t.begin / kSegment; s * kSegment < t.end; s++) {
        const float* part = parts + s * stride + i * (acc_stride + 2);
        fold(total, t.acc, {part[0], part[1]}, part + 2, acc_stride);
      }
      write(t, i, total, t.acc);
    }
  }
};

OCTAVO_END
