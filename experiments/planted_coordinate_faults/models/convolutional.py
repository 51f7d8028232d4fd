"""A residual net of convolutions with batch norms under depth-µP and SGD with momentum."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, planes, multiplier):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(planes), nn.BatchNorm2d(planes)
        self.conv1 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.multiplier = multiplier
        for conv in (self.conv1, self.conv2):
            nn.init.kaiming_normal_(conv.weight)

    def forward(self, x):
        y = self.conv1(F.relu(self.bn1(x), inplace=True))
        y = self.conv2(F.relu(self.bn2(y), inplace=True))
        return x + self.multiplier * y


class ResNet(nn.Module):
    def __init__(self, planes, blocks):
        super().__init__()
        self.stem = nn.Conv2d(3, planes, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*[Block(planes, blocks**-0.5) for _ in range(blocks)])
        self.bn = nn.BatchNorm2d(planes)
        self.fc = nn.Linear(planes, 10)
        self.planes = planes
        nn.init.normal_(self.fc.weight)

    def forward(self, x):
        x = F.relu(self.bn(self.blocks(self.stem(x)))).mean((2, 3))
        return self.fc(x) * (16 / self.planes)


def build(width, depth, seed):
    return ResNet(width, depth)


def batch(seed):
    return torch.randn(4, 3, 6, 6), torch.randint(10, (4,))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def optimizer(model, width, depth):
    m = width / 16
    lr = 0.004
    groups = []
    for name, p in model.named_parameters():
        if name.startswith("blocks") and p.ndim == 4:
            groups.append({"params": [p], "lr": lr})
        elif name == "stem.weight":
            groups.append({"params": [p], "lr": lr * m})
        else:
            groups.append({"params": [p], "lr": lr * m})
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)
