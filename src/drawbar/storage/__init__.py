"""Where bytes come from: stores, endpoint policy, the embedded S3 cluster, the page cache. Never imports torch."""
