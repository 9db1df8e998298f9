"""Items of prompts that encoders read, such as pictures: processing and placeholders."""
