from colossal_vit import launch

from tools.parity.command import parse, run

if __name__ == "__main__":
    launch.call(lambda: run(*parse()))
