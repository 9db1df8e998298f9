// Packing of quantized weights (quant.h, fp8.h), and quantization of weights while they are loaded.
#pragma once
#include "quant.h"

OCTAVO_BEGIN

// Packs rows of one panel. The last row of the weight writes the padding.
void pack_fp8_rows(const PackQuantArgs& a) {
  const int64_t end = a.row0 + a.rows, col = a.row0 / kPanel * kPanel;
  const int64_t padded = end == a.n ? col + kPanel : end;
  const int64_t panel_k = padded_k<bf16>(a.k), groups = fp8_groups(a.k, a.group);
  const int64_t codes_nbytes = ceil_div(a.n, kPanel) * kPanel * panel_k;
  uint8_t* panel = static_cast<uint8_t*>(a.dst) + col * panel_k;
  float* scales = reinterpret_cast<float*>(static_cast<char*>(a.dst) + codes_nbytes) + col * groups;
  constexpr int64_t some = 64;  // inputs that stay in the cache
  for (int64_t k0 = 0; k0 < panel_k; k0 += some)
    for (int64_t n = a.row0; n < padded; n++)
      for (int64_t k = k0; k < min(k0 + some, panel_k); k++)
        panel[(k / kPacked * kPanel + n - col) * kPacked + kPlace[k % kPacked]] =
            n < end && k < a.k ? a.codes[(n - a.row0) * a.k + k] : 0;
  for (int64_t n = a.row0; n < padded; n++)
    for (int64_t g = 0; g < groups; g++)
      scales[g * kPanel + n - col] = n < end ? a.scales[(n - a.row0) * groups + g] : 0;
}

void pack_fp8(const PackQuantArgs& a) {
  for_panels(a.row0, a.rows, a.rows * a.k, [&](int64_t first, int64_t rows) {
    PackQuantArgs part = a;
    part.codes += (first - a.row0) * a.k;
    part.scales += (first - a.row0) * fp8_groups(a.k, a.group);
    part.row0 = first;
    part.rows = rows;
    pack_fp8_rows(part);
  });
}

INLINE uint32_t four_codes(const uint8_t* codes, int64_t count) {
  if (count >= kQuad) return load_raw<uint32_t>(codes);
  uint32_t four = 0;
  for (int64_t i = 0; i < count; i++) four |= uint32_t(codes[i]) << (8 * i);
  return four;
}

INLINE int64_t panel_nbytes(int64_t k, int64_t group, QuantFormat f) {
  if (f == QuantFormat::int8) return padded_k8(k) * kPanel;
  return ceil_div(k, group) * group_nbytes(group, f);
}

// Packs the rows of `a`, all in one panel. The last row of the weight writes the padding.
void pack_rows(const PackQuantArgs& a) {
  const int64_t end = a.row0 + a.rows, col = a.row0 / kPanel * kPanel;
  const int64_t padded = end == a.n ? col + kPanel : end;
  const int64_t nbytes = panel_nbytes(a.k, a.group, a.format);
  uint8_t* panel = static_cast<uint8_t*>(a.dst) + col / kPanel * nbytes;
  auto codes = [&](int64_t n, int64_t k) {
    return n < end && k < a.k ? four_codes(a.codes + (n - a.row0) * a.k + k, a.k - k) : 0;
  };
  if (a.format == QuantFormat::int8) {
    uint8_t* scales = static_cast<uint8_t*>(a.dst) + ceil_div(a.n, kPanel) * nbytes;
    for (int64_t n = a.row0; n < padded; n++) {
      const float scale = n < end ? a.scales[n - a.row0] : 0;
      memcpy(scales + n * sizeof scale, &scale, sizeof scale);
    }
    const int64_t quads = padded_k8(a.k) / kQuad, some = 64;  // a block stays in the cache
    for (int64_t q0 = 0; q0 < quads; q0 += some)
      for (int64_t n = a.row0; n < padded; n++)
        for (int64_t q = q0; q < min(q0 + some, quads); q++) {
          const uint32_t four = codes(n, q * kQuad);
          memcpy(panel + (q * kPanel + n - col) * kQuad, &four, kQuad);
        }
    return;
  }
  const int64_t groups = ceil_div(a.k, a.group);
  const bool bytes = a.format == QuantFormat::int8_groups;
  const bool wide = bytes || a.format == QuantFormat::nf4;
  const int64_t scale_nbytes = wide ? sizeof(float) : sizeof(f16);
  for (int64_t g = 0; g < groups; g++, panel += group_nbytes(a.group, a.format)) {
    uint8_t *scales = panel + kPanel * (bytes ? a.group : a.group / 2),
            *zeros = scales + kPanel * scale_nbytes;
    for (int64_t n = a.row0; n < padded; n++) {
      for (int64_t o = 0; o < a.group / 8; o++) {
        const int64_t k = g * a.group + o * 8;
        const uint32_t first = codes(n, k), second = codes(n, k + kQuad);
        if (bytes) {
          memcpy(panel + (2 * o * kPanel + n - col) * kQuad, &first, kQuad);
          memcpy(panel + ((2 * o + 1) * kPanel + n - col) * kQuad, &second, kQuad);
        } else {
          const uint32_t eight = first | second << 4;
          memcpy(panel + (o * kPanel + n - col) * kQuad, &eight, kQuad);
        }
      }
      const int64_t at = (n - a.row0) * groups + g;
      const float scale = n < end ? a.scales[at] : 0;
      f16 half{};
      store(&half, splat(scale), 1);
      memcpy(scales + (n - col) * scale_nbytes, wide ? (const void*)&scale : &half, scale_nbytes);
      if (a.zeros) zeros[n - col] = n < end ? a.zeros[at] : 0;
    }
  }
}

void pack_quant(const PackQuantArgs& a) {
  if (a.format == QuantFormat::fp8) return pack_fp8(a);
  for_panels(a.row0, a.rows, a.rows * a.k / kQuad, [&](int64_t first, int64_t rows) {
    const int64_t skip = first - a.row0;
    const int64_t groups = a.format == QuantFormat::int8 ? 1 : ceil_div(a.k, a.group);
    PackQuantArgs part = a;
    part.codes += skip * a.k;
    part.scales += skip * groups;
    if (a.zeros) part.zeros += skip * groups;
    part.row0 = first;
    part.rows = rows;
    pack_rows(part);
  });
}

// ---- quantizing weights ----

// Quantizes with one scale for each output: its largest magnitude becomes 448, the largest of e4m3.
void quantize_fp8(const QuantizeArgs& a) {
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    for_panels(a.row0, a.rows, a.rows * a.k, [&](int64_t first, int64_t count) {
      const T* x = static_cast<const T*>(a.src) + (first - a.row0) * a.src_stride;
      const int64_t scales_nbytes = kPanel * sizeof(float);
      float* scales = static_cast<float*>(scratch(scales_nbytes + count * a.k));
      uint8_t* codes = reinterpret_cast<uint8_t*>(scales) + scales_nbytes;
      for (int64_t i = 0; i < count; i++) {
        constexpr float kMost = Format<e4m3>::kMax;
        const T* row = x + i * a.src_stride;
        const float most = largest(row, a.k), scale = most < kTiny ? 0.0f : most / kMost;
        scales[i] = scale;
        for (int64_t k = 0; k < a.k; k += W) {
          const int64_t lanes = min<int64_t>(W, a.k - k);
          const vf v = scale == 0.0f ? vf{} : load(row + k, int(lanes)) / splat(scale);
          const vb b = to_bytes(narrow_fp8<e4m3>(v));
          memcpy(codes + i * a.k + k, &b, lanes);
        }
      }
      pack_fp8_rows({codes, scales, nullptr, a.dst, first, count, a.n, a.k, 0, a.format});
    });
  });
}

constexpr int kMaxGroup = 128;

INLINE vf vabs(vf v) { return (vf)((vi)v & 0x7fffffff); }

// Returns the level nearest to v, and its code
INLINE vf nearest_level(vf v) {
  vf level = splat(kLevels[0]);
  UNROLL for (int i = 1; i < 16; i++)
    level = v > 0.5f * (kLevels[i - 1] + kLevels[i]) ? splat(kLevels[i]) : level;
  return level;
}
INLINE vi nearest_code(vf v) {
  vi code = {};
  UNROLL for (int i = 1; i < 16; i++) code -= v > 0.5f * (kLevels[i - 1] + kLevels[i]);
  return code;
}

// Quantizes a row with one scale: its largest number becomes 127.
template <class T>
INLINE void quantize8(const T* x, int64_t k, uint8_t* codes, float* scale) {
  const float most = largest(x, k);
  const vf inverse = splat(inverse_scale(most));
  for (int64_t j = 0; j < k; j += W) {
    const int64_t count = min<int64_t>(W, k - j);
    vb b = to_bytes(round_to_int(load(x + j, int(count)) * inverse) + 128);
    memcpy(codes + j, &b, count);
  }
  *scale = byte_scale(most);
}

// Candidates for the target of a group's number of largest magnitude, in units of the first level:
// the set of six with the smallest error for the numbers that kLevels is made for, found greedily.
constexpr float kTries[] = {0.96f, 0.8f, 1.04f, 0.84f, -0.76f, 1.0f};

// Quantizes groups of `rows` <= W rows, a row in a lane, with one scale each. kTries yields
// candidates, each improved by least squares for its codes; the one with the smallest squared error
// wins.
template <class T>
INLINE void quantize4(const T* x, int64_t stride, int rows, int64_t k, int64_t group, uint8_t* codes,
                      float* scales) {
  const int64_t groups = ceil_div(k, group);
  for (int64_t g = 0; g < groups; g++) {
    const int64_t from = g * group, count = min(group, k - from);
    vf v[kMaxGroup];
    float line[kMaxGroup + W], (*lanes)[W] = reinterpret_cast<float(*)[W]>(v);
    memset(v, 0, sizeof v);
    for (int i = 0; i < rows; i++) {
      const T* row = x + i * stride + from;
      for (int64_t j = 0; j < count; j += W)
        store(line + j, load(row + j, int(min<int64_t>(W, count - j))));
      for (int64_t j = 0; j < count; j++) lanes[j][i] = line[j];
    }
    vf most = {}, total = {};
    for (int64_t j = 0; j < count; j++) {
      most = vabs(v[j]) > vabs(most) ? v[j] : most;
      total += v[j];
    }
    vf scale = {}, best = {};
    const vf per_unit = vabs(most) < kTiny ? vf{} : float(kLevels[0]) / most;
    for (float place : kTries) {
      const vf inverse = per_unit * splat(place);
      vf vq = {}, qq = {};
      for (int64_t j = 0; j < count; j++) {
        const vf q = nearest_level(v[j] * inverse);
        vq += v[j] * q;
        qq += q * q;
      }
      const vf gain = vq * vq / qq;  // reduction of the squared error compared with zeros
      scale = gain > best ? vq / qq : scale;
      best = gain > best ? gain : best;
    }
    scale = round_to(16.0f * scale, f16{}) + total * 0.0f;  // NaN and infinity stay visible
    const vf inverse = scale == 0.0f ? vf{} : 16.0f / scale;
    for (int64_t j = 0; j < count; j++) {
      vb q = to_bytes(nearest_code(v[j] * inverse));
      for (int i = 0; i < rows; i++) codes[i * k + from + j] = uint8_t(q[i]);
    }
    for (int i = 0; i < rows; i++) scales[i * groups + g] = scale[i];
  }
}

void quantize_weight(const QuantizeArgs& a) {
  if (a.format == QuantFormat::fp8) return quantize_fp8(a);
  with_type(a.dtype, [&](auto t) {
    using T = decltype(t);
    const bool bytes = a.format == QuantFormat::int8;
    const int64_t groups = bytes ? 1 : ceil_div(a.k, a.group);
    for_panels(a.row0, a.rows, a.rows * a.k, [&](int64_t first, int64_t count) {
      const T* x = static_cast<const T*>(a.src) + (first - a.row0) * a.src_stride;
      const int64_t scales_nbytes = ceil_div(count * groups, 16) * 64;
      float* scales = static_cast<float*>(scratch(scales_nbytes + count * a.k));
      uint8_t* codes = reinterpret_cast<uint8_t*>(scales) + scales_nbytes;
      for (int64_t i = 0; i < count; i += W) {
        const int rows = int(min<int64_t>(W, count - i));
        if (bytes)
          for (int64_t r = i; r < i + rows; r++)
            quantize8(x + r * a.src_stride, a.k, codes + r * a.k, scales + r);
        else
          quantize4(x + i * a.src_stride, a.src_stride, rows, a.k, a.group, codes + i * a.k,
                    scales + i * groups);
      }
      pack_rows({codes, scales, nullptr, a.dst, first, count, a.n, a.k, a.group, a.format});
    });
  });
}

OCTAVO_END
