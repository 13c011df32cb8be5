"""``quire bench``: measures a server through its API."""
