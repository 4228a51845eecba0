"""Starting ranks and the life of one rank."""
