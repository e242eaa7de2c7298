"""Context parallelism: several ranks share one packed stream of tokens.

The files in the order in which a micro-batch passes through them:

| file | what it does | where |
|:--|:--|:--|
| deal.py | assigns whole documents (whole_documents.py) or chunks of a stream to ranks | data worker |
| traffic.py | computes which keys a rank sends and receives. The docstring of `Traffic` has an example | data worker |
| shard.py | gives a rank its tokens and its traffic | data worker |
| attention.py | replaces the model's attention function by `ContextAttention` | every layer |
| attention_operators.py | runs flash attention once or twice, while keys are exchanged | every layer |
| operators.py | sends keys to other ranks, and sends gradients back to the keys' ranks | every layer |
| runs.py | calls the kernels for one run of flash attention | every layer |
"""
