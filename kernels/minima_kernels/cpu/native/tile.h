// Tiles: bounds, and the pages that one is made of. Included inside a level's namespace.

constexpr int kMaxTile = 128;
constexpr int kRowBlock = 48;
constexpr int kTileBytes = 16384;  // of each of the two buffers, while head_dim is at most 256
constexpr int kSlack = 64;  // bytes that an expansion may write before and behind its own
constexpr int kMaxChunks = kMaxTile / 16;

struct Chunk {
  const uint8_t* page;
  int page_index;
  int first;    // token in the page
  int tokens;   // valid ones
  int columns;  // tokens rounded up to 16
  int column;   // place in the tile
  // Bytes from here to what a later tile needs in the same place: asked for a few lines at a time
  // while this one is expanded, for more at once than the processor can wait for would stall it.
  int64_t ahead;
};

INLINE void ask_for(const uint8_t* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 3);
}
