"""What every process must agree on: the wire's schema, its stubs, and the rule that hashes prompts into blocks."""
