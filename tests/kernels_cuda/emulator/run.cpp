// A kernel source with its emulation. Macros: SOURCE, KERNELS (`X(name)` of each), those of the source.
#include "emulated_machine.h"
#include SOURCE

extern "C" const char* emulator_error() { return emulator::error.c_str(); }

// 0, or 1 where `emulator_error` says what went wrong; 2 for a name that is not there.
extern "C" int emulate(const char* name, void** arguments, unsigned grid_x, unsigned grid_y, unsigned block_x,
                       unsigned block_y, unsigned seed) {
  const dim3 grid{grid_x, grid_y, 1}, block{block_x, block_y, 1};
#define X(KERNEL) \
  if (!strcmp(name, #KERNEL)) return !emulator::launch(KERNEL, arguments, grid, block, seed);
  KERNELS
  return 2;
}
