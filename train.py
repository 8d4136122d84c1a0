from composer_speedups.train.application import command

if __name__ == "__main__":
    command()
