"""From a module to its channel groups. The files in the order in which a module walks through them:

| file                                    | what happens                                                         |
|-----------------------------------------|----------------------------------------------------------------------|
| `trace.py`                              | leads a module and an example batch through all that follows         |
| `copies.py`, `example.py`               | the copies of the module and of the batch that are worked on         |
| `recorder.py` with `values.py`,         | `forward` becomes a graph, computed for the example: `torch.fx`;     |
| `attributes.py`, `source_lines.py`      | sizes that are attributes know their place                           |
| `exported.py`                           | the same by `torch.export`, where the code cannot be followed        |
| `numbering.py` with `rules.py`,         | every axis of every value in the graph gets unit numbers, carried    |
| `rulebook/`                             | from node to node by one rule per layer or function                  |
| `annotations.py`                        | what a person adds: channels that stay, layers that shrink together  |
| `units.py`                              | tied numbers become units, and units become the groups of            |
|                                         | `../groups.py`                                                       |
| `rewrite.py`                            | sizes in the graph become attributes, so that it runs at every width |
| `reference.py`                          | the masked full module, which `../check.py` compares with cuts       |
"""
