/*
 * Hotlift's lines in QEMU's migration-test; `insert` puts them into migration-qmp.c, with three calls. Each migration over a
 * TCP or UNIX address then goes through relays. Without HOTLIFT_SUITE_RELAYS in the environment nothing changes.
 */

static QObject *hotlift_query(QTestState *who, const char *command)
{
    QDict *response = qtest_qmp(who, "{ 'execute': %s }", command);
    QObject *answer = qdict_get(response, "return");

    g_assert(answer);
    qobject_ref(answer);
    qobject_unref(response);
    return answer;
}

/* Returns the one address that a `migrate` command connects to, or NULL if it is not TCP or UNIX. */
static char *hotlift_address(QDict *args)
{
    const char *uri = qdict_get_try_str(args, "uri");
    QList *channels = qdict_get_qlist(args, "channels");
    QDict *addr;

    if (uri) {
        return g_str_has_prefix(uri, "tcp:") || g_str_has_prefix(uri, "unix:") ? g_strdup(uri) : NULL;
    }
    if (!channels || qlist_size(channels) != 1) {
        return NULL;
    }
    addr = qdict_get_qdict(qobject_to(QDict, qlist_entry_obj(qlist_first(channels))), "addr");
    if (!g_str_equal(qdict_get_try_str(addr, "type") ?: "", "inet")) {
        return NULL;
    }
    return g_strdup_printf("tcp:%s:%s", qdict_get_str(addr, "host"), qdict_get_str(addr, "port"));
}

/* Returns the property verify-peer of the destination's credentials; true without any. */
static bool hotlift_verifies_peer(QTestState *to, QDict *settings)
{
    const char *creds = qdict_get_try_str(qdict_get_qdict(settings, "destination-parameters"), "tls-creds");
    g_autofree char *path = g_strdup_printf("/objects/%s", creds ?: "");
    QDict *response;
    bool verifies;

    if (!creds || !*creds) {
        return true;
    }
    response = qtest_qmp(to, "{ 'execute': 'qom-get', 'arguments': { 'path': %s, 'property': 'verify-peer' } }", path);
    verifies = qdict_get_try_bool(response, "return", true);
    qobject_unref(response);
    return verifies;
}

/* Has the relays started that suit both QEMUs, and sends the source to them. */
static void hotlift_migrate(QTestState *from, QTestState *to, QDict *args)
{
    const char *program = getenv("HOTLIFT_SUITE_RELAYS");
    g_autofree char *address = hotlift_address(args);
    g_autofree char *listening = NULL;
    g_autoptr(GError) error = NULL;
    bool resume = qdict_get_try_bool(args, "resume", false);
    QObject *parameters;
    QDict *settings;
    GString *json;
    char *argv[3];
    int status;

    if (!address) {
        return;
    }
    parameters = hotlift_query(from, "query-migrate-parameters");
    /* Modes cpr-* pass file descriptors to a QEMU on the same host. */
    if (!g_str_equal(qdict_get_try_str(qobject_to(QDict, parameters), "mode") ?: "normal", "normal")) {
        qobject_unref(parameters);
        return;
    }
    if (getenv("HOTLIFT_SUITE_RETURN_PATH") && !resume) {
        migrate_set_capability(from, "return-path", true);
        migrate_set_capability(to, "return-path", true);
    }
    if (!program) {
        qobject_unref(parameters);
        return;
    }
    settings = qdict_new();
    qdict_put_str(settings, "address", address);
    qdict_put_obj(settings, "source-parameters", parameters);
    qdict_put_obj(settings, "destination-parameters", hotlift_query(to, "query-migrate-parameters"));
    qdict_put_obj(settings, "destination-capabilities", hotlift_query(to, "query-migrate-capabilities"));
    qdict_put_bool(settings, "verify-peer", hotlift_verifies_peer(to, settings));
    json = qobject_to_json(QOBJECT(settings));
    qobject_unref(settings);
    argv[0] = (char *)program;
    argv[1] = json->str;
    argv[2] = NULL;
    if (!g_spawn_sync(NULL, argv, NULL, G_SPAWN_DEFAULT, NULL, NULL, &listening, NULL, &status, &error) || status != 0) {
        g_error("Hotlift's relays do not start: %s", error ? error->message : "see above");
    }
    g_string_free(json, true);
    g_strstrip(listening);
    if (qdict_haskey(args, "uri")) {
        qdict_put_str(args, "uri", listening);
    } else {
        QList *channels = qdict_get_qlist(args, "channels");
        QDict *addr = qdict_get_qdict(qobject_to(QDict, qlist_entry_obj(qlist_first(channels))), "addr");

        g_assert(g_str_has_prefix(listening, "tcp:127.0.0.1:"));
        qdict_put_str(addr, "host", "127.0.0.1");
        qdict_put_str(addr, "port", listening + strlen("tcp:127.0.0.1:"));
    }
}

/*
 * Returns `status`, or "setup" while a migration through relays has not failed yet. A relay accepts the connection before
 * the destination can refuse it, so that the source is past "setup" by then.
 */
static char *hotlift_status(char *status)
{
    if (getenv("HOTLIFT_SUITE_RELAYS") && (g_str_equal(status, "active") || g_str_equal(status, "device"))) {
        g_free(status);
        status = g_strdup("setup");
    }
    return status;
}

/* QEMU reports "failed" before it starts the guest again, which only a guest that was stopped by then shows. */
static void hotlift_wait_running(QTestState *who)
{
    for (int i = 0; i < 1000 && getenv("HOTLIFT_SUITE_RELAYS"); i++) {
        QObject *status = hotlift_query(who, "query-status");
        bool running = qdict_get_bool(qobject_to(QDict, status), "running");

        qobject_unref(status);
        if (running) {
            return;
        }
        usleep(10000);
    }
}
