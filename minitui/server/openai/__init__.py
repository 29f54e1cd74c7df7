"""OpenAI's APIs for chats and texts, with /generate and /tokenize: fields, endpoints and answers."""
