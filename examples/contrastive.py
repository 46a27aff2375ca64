"""Train a protein encoder with a contrastive loss on pairs, sharded over any number of processes.

    torchrun --nproc-per-node 2 contrastive.py pairs.fasta starter runs/pairs 200

Records 1 and 2 of pairs.fasta are the first pair, records 3 and 4 the second pair, and so on. The command continues
from the newest checkpoint of runs/pairs. At the end, runs/pairs/model contains the language model for `esmshard embed`.
"""

import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import esmshard as es

PAIRS, GROUPS = 8, 4  # The ranks share the 4 groups of a step. Negatives are the other pairs of a group.


class Encoder(nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.config.dim, 64, bias=False)

    @property
    def layers(self):  # `shard` makes one group of each layer
        return self.trunk.layers

    def forward(self, batch):
        x_TD = self.trunk(batch).representations[self.trunk.config.n_layers]
        means_ND = torch.stack([x_LD.mean(0) for x_LD in batch.residues(x_TD)])
        return F.normalize(self.head(means_ND).float(), dim=1)


def main(fasta, name, out, steps):
    tokens = [es.encode(record.sequence) for record in es.read_fasta(Path(fasta))]
    weights, out = es.read_weights(name), Path(out)
    torch.manual_seed(0)
    head = nn.Linear(weights.config.dim, 64, bias=False).state_dict()  # equal on all ranks
    with es.world() as ranks:
        with torch.device("meta"):
            model = Encoder(es.build(weights.config))
        for part, parameter in model.trunk.named_parameters():
            parameter.requires_grad_(not part.startswith(("lm_head.", *model.trunk.never_learns)))
        es.shard(model, layout := es.Layout(world_size=ranks.size), ranks)
        rows = {f"head.{key}": value.__getitem__ for key, value in head.items()}
        es.materialise(model, lambda n, r: rows[n](r) if n in rows else weights.rows(n[6:], r), layout, ranks)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        state, first = es.state_tensors(model, optimizer), 0
        if newest := es.newest_checkpoint(out, print):
            es.load_checkpoint(newest, state)
            first = es.step_of(newest)
        for step in range(first, int(steps)):
            drawn = random.Random(step).sample(range(len(tokens) // 2), PAIRS * GROUPS)
            for begin in range(0, GROUPS, ranks.size):  # All ranks make the same number of passes.
                group = begin + ranks.rank
                pairs = drawn[group % GROUPS * PAIRS :][:PAIRS]
                batch = es.pack([tokens[2 * n + side] for side in (0, 1) for n in pairs]).to(ranks.device)
                a_ND, b_ND = model(batch).chunk(2)
                loss = F.cross_entropy(a_ND @ b_ND.T / 0.1, torch.arange(PAIRS, device=ranks.device))
                (loss / GROUPS * (group < GROUPS)).backward()  # The gradients of all ranks are summed.
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 50 == 0 or step + 1 == int(steps):
                state = es.state_tensors(model, optimizer)
                newest = es.write_checkpoint(out, step + 1, state, {"loss": loss.item()}, keep=2)
        if ranks.is_first:
            sizes = {n: reader.shape for n, reader in weights.read.items() if not n.startswith("head.")}
            whole = {f"model.trunk.{name}": torch.empty(size) for name, size in sizes.items()}
            es.load_checkpoint(newest, whole, alone=True)
            (out / "model").mkdir(exist_ok=True)
            es.write_transformers(out / "model", weights.config, sizes, lambda n: whole[f"model.trunk.{n}"])


if __name__ == "__main__":
    main(*sys.argv[1:])
