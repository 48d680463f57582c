"""Who may call the cloud and what was done: authority, tokens, principals, rights, audit log."""
