"""What reaches the terminal: signals, hostile text, Markdown, and Textual's insides."""
