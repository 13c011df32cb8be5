"""The gateway: OpenAI schema in, one gRPC call, OpenAI schema out."""
