"""OpenAI's Responses API over the path of chat completions: a translation there and a form back. Nothing is kept."""
