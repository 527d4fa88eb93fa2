// Tiles: bounds, and the pages that one is made of. Included inside a level's namespace.

constexpr int kMaxTile = 128;
constexpr int kRowBlock = 48;
constexpr int kTileBytes = 16384;  // of each of the two buffers, while head_dim is at most 256
constexpr int kMaxChunks = kMaxTile / 16;

struct Chunk {
  const uint8_t* page;
  int page_index;
  int first;    // token in the page
  int tokens;   // valid ones
  int columns;  // tokens rounded up to 16
  int column;   // place in the tile
};
