"""Reads model folders and files into this process: configuration and weights."""
