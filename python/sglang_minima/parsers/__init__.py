"""Parsers of generated text: reasoning and tool calls. Pure: text in, pieces out."""
