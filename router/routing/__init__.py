"""Decides which waiting request goes to which worker, and when. No sockets, no event loop: time is passed in."""
