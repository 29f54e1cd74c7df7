"""The applications of the commands: what they share, the chat, and those for one purpose."""
