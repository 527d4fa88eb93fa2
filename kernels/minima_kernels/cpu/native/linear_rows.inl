// Shared by all levels of linear.h. Included inside a level's namespace.

constexpr float kLimit8 = 127;
constexpr float kLimit16 = 32767;

// What 32 activations are multiplied by, and what undoes it.
struct Step {
  float scale, inverse;
};

INLINE Step step_of(int32_t magnitude_bits, float limit) {
  float magnitude;
  __builtin_memcpy(&magnitude, &magnitude_bits, 4);
  // An infinity or NaN makes the results of its row NaN.
  if (magnitude_bits >= 0x7f800000) return {__builtin_nanf(""), 0};
  if (magnitude < 1e-30f) return {0, 0};
  return {magnitude / limit, limit / magnitude};
}

template <typename Block>
INLINE const Block* row_of(const PanelJob& job, int64_t row) {
  return reinterpret_cast<const Block*>(job.x + row * job.x_stride);
}
