"""Speculative decoding: tokens that are guessed cheaply, and verified several in one step."""
