"""Where a model's files are: a directory, the local Hugging Face cache, or the hub, from which they are downloaded."""
