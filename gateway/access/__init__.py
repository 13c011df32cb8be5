"""Who may call, and how much: keys, their limits, and the layer that asks for them."""
