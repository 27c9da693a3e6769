/* STAND-IN for libnvidia-ml.so.1, the part that sees to fans. There is no card.

   /etc/stand-in-nvml/<index>/: uuid, name, fans (0: a card without), temperature, least (default 30), slowdown (0: not told),
   error (what a question about its temperature answers), refuse (what a call that sets something answers).
   /dev/shm/stand-in-nvml/<index>.<fan>: "manual 52" or "auto 0", kept as a driver in memory keeps it; gone after a reboot.
   /etc/stand-in-nvml/lost: every call fails. Only old functions of the C library, so that any Debian's takes it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define SETUP "/etc/stand-in-nvml"
#define STATE "/dev/shm/stand-in-nvml"
#define ROOT (getenv("SPECRIG_STAND_IN_ROOT") ? getenv("SPECRIG_STAND_IN_ROOT") : "")
enum { OK, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, UNKNOWN = 999 };
typedef unsigned int uint;

static int text(const char *path, char *out, int size) {
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    int n = fread(out, 1, size - 1, file);
    fclose(file);
    while (n > 0 && out[n - 1] == '\n') n--;
    out[n] = 0;
    return 1;
}

static int setup(long card, const char *key, char *out, int size) {
    char path[400];
    snprintf(path, sizeof path, "%s" SETUP "/%ld/%s", ROOT, card, key);
    return text(path, out, size);
}

static int number(long card, const char *key, int otherwise) {
    char word[32];
    return setup(card, key, word, sizeof word) ? atoi(word) : otherwise;
}

static int lost(void) {
    char path[400], word[8];
    snprintf(path, sizeof path, "%s" SETUP "/lost", ROOT);
    return text(path, word, sizeof word) ? UNKNOWN : OK;
}

/* Handles are the index + 1: none is NULL. */
static long index_of(void *device) { return (long)device - 1; }

static const char *state(void *device, uint fan) {
    static char path[400];
    snprintf(path, sizeof path, "%s" STATE, ROOT);
    mkdir(path, 0755);
    snprintf(path, sizeof path, "%s" STATE "/%ld.%u", ROOT, index_of(device), fan);
    return path;
}

static int keep(void *device, uint fan, const char *how, uint percent) {
    int refuse = number(index_of(device), "refuse", 0);
    if (lost() || refuse) return lost() ? UNKNOWN : refuse;
    if ((int)fan >= number(index_of(device), "fans", 0)) return INVALID;
    FILE *file = fopen(state(device, fan), "w");
    if (!file) return UNKNOWN;
    fprintf(file, "%s %u\n", how, percent);
    return fclose(file) ? UNKNOWN : OK;
}

const char *nvmlErrorString(int result) {
    switch (result) {
    case OK: return "Success";
    case INVALID: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(uint *count) {
    char word[100];
    for (*count = 0; setup(*count, "uuid", word, sizeof word); ++*count) {}
    return lost();
}
int nvmlDeviceGetHandleByIndex_v2(uint index, void **device) { *device = (void *)(long)(index + 1); return lost(); }
int nvmlDeviceGetUUID(void *d, char *out, uint size) { return setup(index_of(d), "uuid", out, size) ? OK : NOT_FOUND; }
int nvmlDeviceGetName(void *d, char *out, uint size) { return setup(index_of(d), "name", out, size) ? OK : NOT_FOUND; }
int nvmlDeviceGetTemperature(void *device, uint sensor, uint *celsius) {
    *celsius = number(index_of(device), "temperature", 0);
    return lost() ? UNKNOWN : sensor ? INVALID : number(index_of(device), "error", OK);
}
int nvmlDeviceGetTemperatureThreshold(void *device, uint kind, uint *celsius) {
    *celsius = number(index_of(device), "slowdown", 0);
    return kind == 1 && *celsius ? lost() : NOT_SUPPORTED;
}
int nvmlDeviceGetNumFans(void *device, uint *fans) {
    *fans = number(index_of(device), "fans", 0);
    return lost() ? UNKNOWN : *fans ? OK : NOT_SUPPORTED;
}
int nvmlDeviceGetMinMaxFanSpeed(void *device, uint *least, uint *most) {
    *least = number(index_of(device), "least", 30);
    *most = 100;
    return lost();
}
int nvmlDeviceGetTargetFanSpeed(void *device, uint fan, uint *percent) {
    char word[32];
    *percent = text(state(device, fan), word, sizeof word) && strchr(word, ' ') ? atoi(strchr(word, ' ')) : 0;
    return lost();
}
int nvmlDeviceGetFanControlPolicy_v2(void *device, uint fan, uint *policy) {
    char word[32];
    *policy = text(state(device, fan), word, sizeof word) && !strncmp(word, "manual", 6);
    return lost();
}
int nvmlDeviceSetFanSpeed_v2(void *device, uint fan, uint percent) {
    if (percent > 100 || (int)percent < number(index_of(device), "least", 30)) return INVALID;
    return keep(device, fan, "manual", percent);
}
int nvmlDeviceSetDefaultFanSpeed_v2(void *device, uint fan) { return keep(device, fan, "auto", 0); }
