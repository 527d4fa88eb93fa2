"""Text to token ids and back: tokenizer, incremental decoding, and the processes around them."""
