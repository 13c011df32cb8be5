"""The worker: owns KV blocks, composes and runs engine steps, samples."""
