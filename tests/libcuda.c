/* A driver of CUDA that has no GPU, to be found in place of libcuda.so.1. Each process that starts CUDA appends its
   number to the file CUDA_STARTS: from then on, a process that it forks could not use a GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NO_DEVICE = 100 };

int cuInit(unsigned flags)
{
    FILE *file = fopen(getenv("CUDA_STARTS"), "a");
    fprintf(file, "%d\n", getpid());
    fclose(file);
    return NO_DEVICE;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return SUCCESS;
}

static int no_device(void)
{
    return NO_DEVICE;
}

/* CUDA's runtime looks up all that it may need before it calls cuInit. */
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, void *status)
{
    if (strcmp(name, "cuInit") == 0)
        *function = (void *)cuInit;
    else if (strcmp(name, "cuDriverGetVersion") == 0)
        *function = (void *)cuDriverGetVersion;
    else if (strcmp(name, "cuGetProcAddress") == 0)
        *function = (void *)cuGetProcAddress_v2;
    else
        *function = (void *)no_device;
    return SUCCESS;
}
