from colossal_vit.launch.exits import Exits

from tools.parity.command import parse, run

if __name__ == "__main__":
    Exits().call(lambda: run(*parse()))
