"""For the whole suite: one torch thread. On small models a second one costs more than it computes, most of all when the
machine is busy."""

import torch

torch.set_num_threads(1)
