"""The API told to machines and people: the OpenAPI document, made from the protocol structs, and Swagger UI."""
