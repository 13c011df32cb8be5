"""``quire bench``: measures a server through its API, and the engine and its start by themselves."""
