"""The engine in this process, without servers: the worker's engine between the router's tokenizer and detokenizer."""
