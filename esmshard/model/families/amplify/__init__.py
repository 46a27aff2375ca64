"""AMPLIFY: shapes, blocks, the map between its 27 tokens and those of `esmshard.vocab`, and its file layout."""
