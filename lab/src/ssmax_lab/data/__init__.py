"""From text to tokens: tokenizers, shards, an order that anyone can resume."""
