"""What the outputs of a key's requests must not have in them."""
