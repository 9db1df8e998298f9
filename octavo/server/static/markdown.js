// Markdown, rendered as elements.
