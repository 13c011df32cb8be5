"""Anthropic's Messages API over the path of chat completions: a translation there and a form back."""
