"""The quire command: starts the processes, fetches models, chats."""
