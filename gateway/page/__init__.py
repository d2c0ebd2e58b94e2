"""The page at `/`: a prompt's answer with and without speculation, side by side.

Owns the page's files and how they are served. The page calls the OpenAI API as any client does, so
the server side knows neither requests nor models.
"""
