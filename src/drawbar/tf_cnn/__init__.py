"""tf_cnn_benchmarks' command line as a recipe."""
