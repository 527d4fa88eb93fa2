// Runs every kernel at every level under AddressSanitizer and UndefinedBehaviorSanitizer, on arenas
// that end where their last page ends, and compares the levels with each other. Built and run by
// test_cpu_sanitizers.py; with an argument, a selection.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "exports.h"

void check_linear();  // sanitize_linear.cpp
void check_stack();   // sanitize_stack.cpp

namespace {

std::mt19937 generator(1);

struct Shape {
  int heads, group, dim, page_size, k_levels, v_levels;
  FormatType type;
};

struct Word {
  int codes, bits;
};

// The packing of minima_kernels/packing.py.
Word word(int levels) {
  static const Word words[] = {{},      {},      {8, 8},  {5, 8},  {4, 8},  {3, 7},
                               {5, 13}, {6, 17}, {4, 12},  {5, 16}, {3, 10}, {2, 7},
                               {5, 18}, {4, 15}, {2, 8},   {2, 8},  {2, 8}};
  return words[levels];
}

void register_all() {
  for (int levels = 2; levels <= 16; ++levels) {
    int8_t centroids[16];
    float boundaries[16];
    for (int i = 0; i < levels; ++i)
      centroids[i] = static_cast<int8_t>(std::lround(-127 + 254.0 * i / (levels - 1)));
    for (int i = 0; i + 1 < levels; ++i)
      boundaries[i] = 0.5f * (centroids[i] + centroids[i + 1]) * 0.02f;
    const Word w = word(levels);
    if (!minima_register_levels(levels, w.codes, w.bits, 0.02f, centroids, boundaries)) std::abort();
  }
}

int64_t aligned(int64_t bytes) { return (bytes + 15) / 16 * 16; }

int64_t stream(int levels, int64_t codes) {
  const Word w = word(levels);
  return ((codes + w.codes - 1) / w.codes * w.bits + 31) / 32 * 4;
}

// The layout of minima_kernels/formats/base.py; returns the bytes of the share.
int64_t lay_out(const Shape& s, MinimaFormat& f) {
  const int64_t codes = static_cast<int64_t>(s.page_size) * s.dim;
  const int width[] = {4, 2, 2, 1};
  f = {};
  f.type = s.type;
  f.k_levels = s.k_levels;
  f.v_levels = s.v_levels;
  f.k_codes_head = s.type == kTQ ? stream(s.k_levels, codes) : codes * width[s.type];
  f.v_codes_head = s.type == kTQ ? stream(s.v_levels, codes) : codes * width[s.type];
  const bool scaled = s.type >= kFP8;
  f.k_scales_head = f.v_scales_head = scaled ? 2 * s.page_size : 0;
  f.k_mean_head = s.type == kTQ ? 2 * s.dim : 0;
  f.v_codes = f.k_codes_head * s.heads;
  const int64_t scales = aligned((f.k_codes_head + f.v_codes_head) * s.heads);
  const int64_t mean = scales + aligned(2 * f.k_scales_head * s.heads);
  f.k_scales = scaled ? scales : -1;
  f.v_scales = scaled ? scales + f.k_scales_head * s.heads : -1;
  f.k_mean = s.type == kTQ ? mean : -1;
  return mean + aligned(f.k_mean_head * s.heads);
}

std::vector<float> normal(int64_t count) {
  std::normal_distribution<float> law;
  std::vector<float> values(count);
  for (float& value : values) value = law(generator);
  return values;
}

void compare(const char* what, const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 1e-30;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * static_cast<double>(a[i] - b[i]);
    size += b[i] * static_cast<double>(b[i]);
  }
  if (!(std::sqrt(difference / size) < 1e-3)) {
    std::printf("%s: the levels differ by %g\n", what, std::sqrt(difference / size));
    std::exit(1);
  }
}

// Pages of `shape` re-encoded from random float32 pages, at the very end of their arena.
void run(const Shape& shape) {
  Shape plain = shape;
  plain.type = kF32;
  MinimaFormat format, source;
  const int64_t share = lay_out(shape, format), source_share = lay_out(plain, source);
  const MinimaGeometry geometry = {shape.heads, shape.group, shape.dim, shape.page_size};
  constexpr int kPages = 5;
  const int64_t size = kPages * (share + source_share);
  const std::unique_ptr<uint8_t[]> arena(new uint8_t[size]);
  const std::vector<float> content = normal(kPages * source_share / 4);
  std::memcpy(arena.get(), content.data(), kPages * source_share);
  int64_t sources[kPages], pages[kPages];
  for (int i = 0; i < kPages; ++i) {
    sources[i] = i * source_share;
    pages[i] = kPages * source_share + i * share;
  }
  const uint8_t copied = shape.type == kF32;
  minima_retier(&source, &format, &share, &copied, 1, &geometry, arena.get(), sources, pages,
                kPages, 2);
  const int heads = shape.heads * shape.group, dim = shape.dim;
  if (shape.type != kTQ) {
    const std::vector<float> k = normal(70 * shape.heads * dim), v = normal(70 * shape.heads * dim);
    std::vector<int64_t> shares(70), slots(70);
    for (int i = 0; i < 70; ++i) {
      shares[i] = pages[i % kPages];
      slots[i] = shape.page_size - 1 - i % shape.page_size;
    }
    minima_append(&format, &geometry, k.data(), v.data(), arena.get(), shares.data(), slots.data(),
                  70, 2);
  }

  // Two rows: both read pages 0 to 2, the second also 3 and 4, of which the last is open.
  const int64_t item_page[] = {0, 3, 5}, item_reader[] = {0, 2}, item_entry[] = {0, 6};
  const int32_t item_kind[] = {0, 0}, item_readers[] = {2, 1};
  const int32_t item_last[] = {shape.page_size, 1 + shape.page_size / 3};
  const int64_t readers[] = {0, 1, 1}, row_partial[] = {0, 1, 3}, row_partials[] = {0, 1, 2};
  const int64_t entry_rows[] = {0, 1, 0, 1, 0, 1, 1, 1};
  const MinimaDecodePlan plan = {2,           2,            3,           pages,      item_page,
                                 item_kind,   item_last,    item_reader, item_readers, item_reader,
                                 item_entry,  readers,      row_partial, row_partials};
  const std::vector<float> q = normal(2 * heads * dim);
  std::vector<float> partials(3 * heads * (dim + 2)), out(2 * heads * dim), lse(2 * heads);
  std::vector<float> mass(8 * heads);
  minima_decode(&plan, &geometry, &format, q.data(), arena.get(), 0.1f, partials.data(), out.data(),
                lse.data(), mass.data(), entry_rows, 8, 2);

  const int64_t q_indptr[] = {0, 37, 38}, run_indptr[] = {0, 1, 2}, run_page[] = {0, 5, 8};
  const int32_t run_kind[] = {0, 0}, run_last[] = {item_last[1], shape.page_size};
  int64_t run_pages[8];
  for (int i = 0; i < 8; ++i) run_pages[i] = pages[i % kPages];
  const MinimaExtendPlan extend = {2, q_indptr, run_indptr, run_page, run_kind, run_last, run_pages};
  const std::vector<float> queries = normal(38 * heads * dim);
  const std::vector<float> kv = normal((2 * shape.heads * 38 + 15) * dim);
  std::vector<float> extended(38 * heads * dim), extended_lse(38 * heads);
  minima_extend(&extend, &geometry, &format, queries.data(), kv.data(), arena.get(), 0.1f,
                extended.data(), extended_lse.data(), 2);

  const std::string level = minima_level();
  minima_force_level("portable");
  std::vector<float> expected(out.size()), expected_extended(extended.size());
  minima_decode(&plan, &geometry, &format, q.data(), arena.get(), 0.1f, partials.data(),
                expected.data(), lse.data(), nullptr, nullptr, 0, 1);
  minima_extend(&extend, &geometry, &format, queries.data(), kv.data(), arena.get(), 0.1f,
                expected_extended.data(), extended_lse.data(), 1);
  minima_force_level(level.c_str());
  compare("decode", out, expected);
  compare("extend", extended, expected_extended);
}

}  // namespace

// `quick`: every format and level count, at one shape each.
int main(int argc, char**) {
  const bool quick = argc > 1;
  register_all();
  for (const char* level : {"portable", "avx2", "avx512"}) {
    if (!minima_force_level(level)) {
      std::printf("no %s here\n", level);
      continue;
    }
    check_linear();
    check_stack();
    int count = 0;
    const auto formats = [&count](int dim, int page_size, int step) {
      for (const FormatType type : {kF32, kF16, kBF16, kFP8})
        run({2, 1 + count++ % 8, dim, page_size, 0, 0, type});
      for (int levels = 2; levels <= 16; levels += step)
        run({1 + count % 2, 1 + count++ % 8, dim, page_size, levels, 18 - levels, kTQ});
    };
    if (quick) {
      formats(80, 48, 1);
    } else {
      for (const int dim : {64, 80, 128, 256})
        for (const int page_size : {16, 48, 128}) formats(dim, page_size, 1 + count % 2);
    }
    std::printf("%s: %d cases\n", level, count);
  }
}
