"""TFRecord framing, the Example schema, packers, synthetic sets and the manifest. Never imports torch."""
